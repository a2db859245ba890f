# make demo            trains and evaluates EAST on pictures that it makes itself
# make demo-pointnet   trains and evaluates PointNet++ on clouds that it makes itself
# make test            lint and the whole test suite
# All make .venv and install what they need. PYTHON=python3.12 chooses another interpreter.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN = .venv/bin
DEMO = demo
SHELL = /bin/bash

.PHONY: demo demo-pointnet test clean

$(BIN)/.installed: requirements.txt
	@$(PYTHON) -c "import sys; sys.exit(None if (3, 11) <= sys.version_info[:2] <= (3, 13) else \
	    'Python 3.11 to 3.13 is needed, found ' + sys.version.split()[0] + ': make PYTHON=python3.11')"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

$(BIN)/.installed-dev: requirements-dev.txt $(BIN)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

# So short a run wants its own decays of the batch-norm statistics and of the averaged weights, and
# pictures of this size a smaller --text_scale.
demo: $(BIN)/.installed
	$(BIN)/python -m data.synthetic_text --output_dir=$(DEMO)/data --num_train=1500 --num_test=60
	rm -rf $(DEMO)/checkpoints $(DEMO)/results
	set -o pipefail; CUDA_VISIBLE_DEVICES= TF_CPP_MIN_LOG_LEVEL=2 $(BIN)/python multigpu_train.py \
	    --gpu_list=0,1 --input_size=128 --batch_size_per_gpu=4 --num_readers=2 --seed=0 \
	    --training_data_path=$(DEMO)/data/train --checkpoint_path=$(DEMO)/checkpoints \
	    --text_scale=128 --random_scale=1 --min_crop_side_ratio=0.8 \
	    --learning_rate=0.001 --decay_steps=450 --decay_rate=0.3 --max_steps=550 \
	    --moving_average_decay=0.98 --bn_decay=0.95 --bn_updates=all | tee $(DEMO)/train.log
	CUDA_VISIBLE_DEVICES= TF_CPP_MIN_LOG_LEVEL=2 $(BIN)/python eval.py --gpu_list=0 \
	    --test_data_path=$(DEMO)/data/test/images --gt_path=$(DEMO)/data/test/gt --text_scale=128 \
	    --checkpoint_path=$(DEMO)/checkpoints --output_dir=$(DEMO)/results
	$(BIN)/python -m utils.plot_log --log=$(DEMO)/train.log --output=$(DEMO)/curve.png
	@echo "pictures with the boxes found: $(DEMO)/results; training curve: $(DEMO)/curve.png"

# So short a run wants its own decay of the batch-norm statistics, which comes with --decay_step.
demo-pointnet: $(BIN)/.installed
	$(BIN)/python -m data.synthetic_shapes --output_dir=$(DEMO)/shapes --num_train=480 --num_test=200
	rm -rf $(DEMO)/pointnet_log $(DEMO)/pointnet_results
	CUDA_VISIBLE_DEVICES= TF_CPP_MIN_LOG_LEVEL=2 $(BIN)/python train_multi_gpu.py --num_gpus=2 \
	    --model=pointnet2_cls_ssg --num_point=512 --batch_size=16 --max_epoch=6 --decay_step=1200 \
	    --seed=0 --data_path=$(DEMO)/shapes --log_dir=$(DEMO)/pointnet_log
	CUDA_VISIBLE_DEVICES= TF_CPP_MIN_LOG_LEVEL=2 $(BIN)/python evaluate.py --num_votes=12 \
	    --model=pointnet2_cls_ssg --num_point=512 --data_path=$(DEMO)/shapes \
	    --model_path=$(DEMO)/pointnet_log/model.ckpt --dump_dir=$(DEMO)/pointnet_results
	@echo "clouds with label and prediction: $(DEMO)/pointnet_results/test_clouds.png"

test: $(BIN)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

clean:
	rm -rf .venv $(DEMO)
