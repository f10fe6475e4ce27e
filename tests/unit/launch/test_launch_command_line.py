"""What a person meets first: help and mistakes answer at once, in one line, without torch."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAMS = {
    "launch_stage": "launch.stage",
    "launch_trainer": "launch.trainer",
    "launch_backbone": "launch.backbone",
    "launch_local": "launch.local",
    "swarm_status": "launch.status",
    "export_model": "launch.export",
    "replay_ticket": "launch.replay",
}


def run_main(program: str, *argv: str) -> int:
    main = importlib.import_module(PROGRAMS[program]).main
    try:
        return main(list(argv))
    except SystemExit as error:
        return error.code


def one_line(capsys: pytest.CaptureFixture[str], program: str) -> str:
    captured = capsys.readouterr()
    assert captured.out == "", f"a mistake printed to stdout: {captured.out!r}"
    lines = captured.err.splitlines()
    assert len(lines) == 1, f"a mistake must be one line on stderr, got {lines}"
    assert lines[0].startswith(f"{program}: "), lines[0]
    return lines[0]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('name = "t"\nnum_stages = 2\n')
    return path


@pytest.mark.parametrize("mark", ["run.json", "checkpoints", "identity.json"])
def test_a_model_is_not_written_among_a_runs_state(mark: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / mark).mkdir()
    assert run_main("export_model", "--checkpoints", str(tmp_path), "--out", str(tmp_path)) == 2
    assert f"--out {tmp_path} is a state directory: name another, such as {tmp_path}/exported" in one_line(capsys, "export_model")


@pytest.mark.parametrize("how", ["print('x' * 10**6)", "console().print('x' * 100)", "print('x')"])
def test_who_stops_reading_ends_a_launcher_quietly(how: str) -> None:
    code = (
        "import sys; from launch.options import OutputOptions; from launch.processes.logs import console; "
        "from launch.processes.runner import main_of; "
        "options = OutputOptions(log_format='text', log_level='info', quiet=False); "
        f"sys.exit(main_of('p', lambda words: options, lambda *_: {how} or 0, []))"
    )
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as out:
        done = subprocess.run([sys.executable, "-c", code], stdout=out, stderr=subprocess.PIPE, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_unknown_option_is_one_line_and_exit_code_2(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    required = {
        "launch_stage": ["--run", __file__],
        "launch_trainer": ["--run", __file__],
        "swarm_status": ["h:1"],
        "launch_backbone": ["--run", __file__],
        "export_model": ["--checkpoints", ".", "--out", "x"],
        "replay_ticket": ["--checkpoints", ".", "--step", "1"],
    }
    assert run_main(program, *required.get(program, []), "--no-such-option", "1") == 2
    assert "--no-such-option" in one_line(capsys, program)


def test_nobody_aggregates_for_a_run_that_uses_no_auxiliaries(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("launch_backbone", "--run", str(run_file), "--host", "127.0.0.1", "--aggregate") == 2
    assert "the run uses no auxiliaries; create one with auxiliaries = 1" in one_line(capsys, "launch_backbone")


@pytest.mark.parametrize(
    ("program", "argv", "message"),
    [
        ("export_model", ["--checkpoints", ".", "--out", ""], "--out: '' is no path"),
        ("export_model", ["--checkpoints", "", "--out", "x"], "--checkpoints: '' is no path"),
        ("export_model", ["--checkpoints", ".", "--out", "/dev/null"], "--out: /dev/null is no directory"),
        ("export_model", ["--checkpoints", ".", "--out", "x", "--model", ""], "--model: '' names nothing"),
        (
            "launch_backbone",
            ["--run", ".", "--public-host", ""],
            "--public-host: '' is neither the name of a host nor an address",
        ),
        ("launch_backbone", ["--run", ".", "--public-host", "host with space"], "neither the name of a host nor an address"),
        ("launch_backbone", ["--run", ".", "--public-host", "203.0.113.500"], "neither the name of a host nor an address"),
        (
            "launch_backbone",
            ["--run", ".", "--public-host", "203.0.113.5:41234"],
            "give 203.0.113.5 here, and --public-port 41234",
        ),
        ("launch_backbone", ["--run", ".", "--public-host", "[2001:db8::1]:4"], "give [2001:db8::1] here, and --public-port 4"),
        ("launch_backbone", ["--run", "/dev/null"], "/dev/null: is a device, not a run file"),
        ("launch_local", ["--threads", "99999999"], "--threads: 99999999 is more than 1024"),
        (
            "launch_local",
            ["--in-flight", "99999999"],
            "--in-flight: 99999999 micro-batches are more than a step has at most, 65536",
        ),
        (
            "replay_ticket",
            ["--checkpoints", ".", "--step", "1", "--tolerance", "nan"],
            "--tolerance: 'nan' is not a number above 0",
        ),
        ("launch_local", ["--state-dir", ""], "--state-dir: '' is no path"),
        ("launch_local", ["--data", ""], "--data: '' is no path"),
        ("launch_local", ["--peers-per-stage", "1000000"], "--peers-per-stage: 1000000 is more than 1024"),
        (
            "launch_stage",
            ["--join", "h:1", "--memory-limit", "-1GiB"],
            "--memory-limit: '-1GiB' is no size such as 4GiB or 500MB",
        ),
        ("launch_local", ["--memory-limit", "10"], "--memory-limit: '10' is too little for any stage"),
        ("launch_local", ["--memory-limit", "-1GiB"], "--memory-limit: '-1GiB' is no size such as 4GiB or 500MB"),
        ("launch_local", ["--trainers", "1025"], "--trainers: 1025 is more than 1024"),
    ],
)
def test_values_that_would_do_something_unwanted_are_refused(
    program: str, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(program, *argv) == 2
    assert message in one_line(capsys, program)


def test_options_cannot_be_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("launch_local", "--trainer", "2") == 2
    assert "--trainer" in one_line(capsys, "launch_local")


@pytest.mark.parametrize("program", ["launch_local", "launch_backbone", "launch_stage", "launch_trainer"])
def test_an_unknown_key_names_file_and_key(program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "typo.toml"
    path.write_text("learning_rat = 1.0\n")
    assert run_main(program, "--run", str(path)) == 2
    line = one_line(capsys, program)
    assert str(path) in line
    assert "'learning_rat'" in line


def test_a_nested_unknown_key_names_file_and_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "typo.toml"
    path.write_text("[timing]\nstall = 1.0\n")
    assert run_main("launch_local", "--run", str(path)) == 2
    line = one_line(capsys, "launch_local")
    assert str(path) in line
    assert "timing.stall" in line


def test_malformed_toml_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("name = \n")
    assert run_main("launch_local", "--run", str(path)) == 2
    assert str(path) in one_line(capsys, "launch_local")


@pytest.mark.parametrize("program", ["launch_local", "launch_trainer"])
def test_a_missing_data_file_is_named(program: str, run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "no.txt"
    assert run_main(program, "--run", str(run_file), "--data", str(missing)) == 2
    assert str(missing) in one_line(capsys, program)


def test_a_missing_data_file_of_a_run_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text('data = "no.txt"\n')
    assert run_main("launch_local", "--run", str(path)) == 2
    line = one_line(capsys, "launch_local")
    assert f"{path}: data: {tmp_path / 'no.txt'}" in line


def test_a_missing_run_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("launch_backbone", "--run", "/no/run.toml") == 2
    assert "/no/run.toml" in one_line(capsys, "launch_backbone")


def test_a_batch_that_is_no_multiple_of_the_micro_batch_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("launch_local", "--target-batch-size", "65", "--micro_batch_size", "8") == 2
    line = one_line(capsys, "launch_local")
    assert "65" in line
    assert "8" in line


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--learning-rate", "-1"], "--learning-rate"),
        (["--learning_rate=nan"], "--learning-rate: Input should be a finite number"),
        (["--stages", "0"], "--stages: "),
        (["--num-stages", "0"], "--num-stages: "),
        (["--set", "num_stages=0"], "num_stages: "),
        (["--target-batch-size", "65"], "--target-batch-size 65 is not a multiple of micro_batch_size 8"),
        (["--compression", "9bit"], "compression"),
        (["--seed", "x"], "seed"),
        (["--timing", "moon"], "moon"),
        (["--set", "timing.stall_s=-5"], "timing.stall_s"),
        (["--set", "nothing"], "FIELD.KEY=VALUE"),
        (["--model-options", "{"], "--model-options"),
        (["--device", "gpu"], "--device"),
        (["--optimizer", "sgd"], "optimizer"),
        (["--device", "cpu", "--offload-optimizer"], "--offload-optimizer"),
        (["--memory-limit", "4XB"], "4XB"),
        (["--port", "70000"], "70000"),
        (["--min-peers-per-stage", "9"], "--min-peers-per-stage"),
        (["--metrics", "/no/such/m.jsonl"], "/no/such/m.jsonl"),
    ],
)
def test_a_bad_value_is_named(argv: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("launch_local", *argv) == 2
    assert named in one_line(capsys, "launch_local")


def test_a_run_that_freezes_what_its_model_has_not_is_not_created(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file.write_text('frozen = ["embedding.*"]\n')
    assert run_main("launch_backbone", "--run", str(run_file), "--host", "127.0.0.1") == 2
    line = one_line(capsys, "launch_backbone")
    assert "'embedding.*'" in line
    assert "model.embed_tokens.weight" in line


def test_a_run_must_come_from_somewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("launch_stage") == 2
    line = one_line(capsys, "launch_stage")
    assert "--run" in line
    assert "--join" in line


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_port_in_use_is_named(kind: socket.SocketKind, run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("swarm.peer.backbone", reason="the backbone peer is missing")
    with socket.socket(socket.AF_INET, kind) as taken:
        taken.bind(("127.0.0.1", 0))
        if kind == socket.SOCK_STREAM:
            taken.listen()
        port = taken.getsockname()[1]
        argv = ["--run", str(run_file), "--host", "127.0.0.1", "--port", str(port)]
        assert run_main("launch_backbone", *argv) == 2
    assert f"127.0.0.1:{port}" in one_line(capsys, "launch_backbone")


@pytest.mark.parametrize("program", ["launch_stage", "launch_trainer", "launch_backbone"])
def test_a_join_address_that_nobody_answers_names_address_and_time(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    role = {"launch_stage": "stage_peer", "launch_trainer": "trainer", "launch_backbone": "backbone"}[program]
    pytest.importorskip(f"swarm.peer.{role}", reason="this role of peer is missing")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, so that nobody else takes it, and not listening
        where = f"127.0.0.1:{nobody.getsockname()[1]}"
        began = time.monotonic()
        assert run_main(program, "--join", where, "--join-timeout", "0.5", "--host", "127.0.0.1") == 2
        assert time.monotonic() - began < 5.0
    line = one_line(capsys, program)
    assert where in line
    assert "0.5 s" in line


def test_a_status_that_nobody_gives_is_a_failure_that_names_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{nobody.getsockname()[1]}"
        assert run_main("swarm_status", where, "--timeout", "0.5") == 1
    assert where in one_line(capsys, "swarm_status")


def test_help_and_mistakes_answer_without_torch(tmp_path: Path) -> None:
    """One process tries every launcher's help and a mistake that only validation finds."""
    script = f"""
import contextlib, importlib, io, json, sys
answers = {{}}
for module in {list(PROGRAMS.values())!r}:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        importlib.import_module(module).main(["--help"])
    answers[module] = out.getvalue()
code = importlib.import_module("launch.local").main(["--stages", "0"])
print(json.dumps({{"answers": answers, "code": code, "slow": [m for m in ("torch", "transformers") if m in sys.modules]}}))
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path]))}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, env=env, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["slow"] == [], "help or validation imported a slow module"
    assert result["code"] == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for module, text in result["answers"].items():
        assert "(default: " in text, f"{module} --help shows no defaults"
    assert not list(tmp_path.iterdir()), "a refused command line left files behind"


def test_every_field_of_the_configuration_is_an_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    from swarm.base.config import RunConfig

    run_main("launch_local", "--help")
    text = capsys.readouterr().out
    for name in RunConfig.model_fields.keys() - {"data_digest", "tokenizer_digest", "weights", "weights_source"}:
        assert f"--{name.replace('_', '-')} " in text, f"no option for {name}"
