from absl import flags

from utils import log_file


def test_lines_go_to_the_screen_and_at_once_to_the_file(tmp_path, capsys):
    path = tmp_path / "log.txt"
    with log_file.LogFile(path) as log:
        log.write("only here: ü")
        log.log_string("both")
        assert path.read_text(encoding="utf-8") == "only here: ü\nboth\n"
    assert capsys.readouterr().out == "both\n"
    with log_file.LogFile(path, append=True) as log:
        log.write("more")
    assert path.read_text(encoding="utf-8").splitlines()[1:] == ["both", "more"]
    with log_file.LogFile(path):
        pass
    assert path.read_text() == ""


def test_line_of_flags():
    values = flags.FlagValues()
    flags.DEFINE_integer("number", 3, "help", flag_values=values)
    flags.DEFINE_string("name", "x", "help", flag_values=values)
    assert log_file.flags_line(values, "number") == "Namespace(number=3, name='x')"
