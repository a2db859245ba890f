"""Weights of the golden sets: not stored, but drawn again from the rule that each set states."""

import fnmatch
import json
import math
import re
import zlib

import numpy as np

from tests.golden_sets import golden_path

DRAWING = ("SALT", "generator", "hash", "kept at initial value")  # of the shorter form


class GoldenWeights:
    """Values of variables by name, from a set's `weights_rule.json`.

    `salt` and `rules` (first match counts) are the set's. A match with slashes is a pattern of the
    whole name, `**` for any number of parts; else it lists last parts of names ("any other
    weights", "beta, biases", "weights(rank>=2)"). In the shorter form of the file every entry that
    is not about the drawing itself is a rule.
    """

    def __init__(self, port):
        rule = json.loads(golden_path(port, "weights_rule.json").read_text())
        if "rules" in rule:
            self.rules = [(entry["match"], entry["value"]) for entry in rule["rules"]]
        else:
            self.rules = [entry for entry in rule.items() if entry[0] not in DRAWING]
        self.salt = rule["salt"] if "salt" in rule else rule["SALT"]
        self.first3 = rule.get("first3", {})  # a check: the first values of some variables

    def _expression(self, name):
        for match, value in self.rules:
            if "/" in match:
                matches = fnmatch.fnmatchcase(name, match.replace("**", "*"))
            else:
                parts = re.sub(r"\(.*\)", "", match.removeprefix("any other ")).split(",")
                matches = name.split("/")[-1] in [part.strip() for part in parts]
            if matches:
                return value
        raise KeyError(f"no rule of the golden set gives a value for {name}")

    def value(self, name, shape):
        """float32 array of one variable."""
        state = np.random.RandomState(zlib.crc32((self.salt + name).encode()) & 0xFFFFFFFF)
        names = {
            "n": state.standard_normal(shape),
            "fan_in": math.prod(shape[:-1]),
            "sqrt": math.sqrt,
            "abs": np.abs,
            "prod": math.prod,
            "shape": shape,
        }
        value = eval(self._expression(name), {"__builtins__": {}}, names)
        return np.asarray(value, np.float32)

    def load(self, session, variables, perturbation=0.0, seed=0):
        """Sets variables, in one run; each value off by about `perturbation`, relatively."""
        noise = np.random.RandomState(seed)
        feed = {}
        for variable in variables:
            value = self.value(variable.op.name, variable.shape.as_list())
            if perturbation:
                factor = 1 + perturbation * noise.standard_normal(value.shape)
                value = (value * factor).astype(np.float32)
            feed[variable.initializer.inputs[1]] = value
        session.run([v.initializer for v in variables], feed)
