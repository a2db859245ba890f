import shutil

from absl import flags

from utils import log_file


def test_lines_go_to_the_screen_and_at_once_to_the_file(tmp_path, capsys):
    path = tmp_path / "run" / "log.txt"
    path.parent.mkdir()
    log = log_file.LogFile(path)
    log.write("only here: ü")
    log.log_string("both")
    assert path.read_text(encoding="utf-8") == "only here: ü\nboth\n"
    assert capsys.readouterr().out == "both\n"
    log_file.LogFile(path, append=True).write("more")
    assert path.read_text(encoding="utf-8").splitlines()[1:] == ["both", "more"]
    log = log_file.LogFile(path)
    assert path.read_text() == ""
    shutil.rmtree(path.parent)
    log.write("again")
    assert path.read_text() == "again\n"


def test_line_of_flags():
    values = flags.FlagValues()
    flags.DEFINE_integer("number", 3, "help", flag_values=values)
    flags.DEFINE_string("name", "x", "help", flag_values=values)
    assert log_file.flags_line(values, "number") == "Namespace(number=3, name='x')"
