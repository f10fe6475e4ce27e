"""Checkpoints are written whole or not at all, carry their head, and are never mixed."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file

from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError, StorageError
from swarm.base.ids import ZERO_BALLOT
from swarm.stage.digest import digest_of
from swarm.stage.layout import Layout
from swarm.stage.moments import Moments, OptimizerState, numbers_of
from swarm.stage.saved import checkpoint as module
from swarm.stage.saved.checkpoint import StageCheckpoint, mark_best, saved_steps, scan, write_checkpoint
from swarm.stage.saved.whole_checkpoint import find_complete, require_own, use_complete
from swarm.stage.versions import StageState, Version, make_version
from swarm.wire.messages import CommitRecord

torch.set_num_threads(1)

NUM_STAGES = 3
CONFIG = RunConfig(num_stages=NUM_STAGES, checkpoint_keep=2)
LAYOUT = Layout.of(torch.nn.Linear(3, 2))


def record_of(num_commits: int, lineage: str, *, saved: int = 0) -> CommitRecord:
    return CommitRecord(
        run="1" * 64,
        step=num_commits - 1,
        version_id=digest_of([torch.tensor([num_commits]), torch.tensor([ord(lineage)])]),
        ballot=ZERO_BALLOT,
        members=((),) * NUM_STAGES,
        saved=saved,
    )


def moments_of(layout: Layout = LAYOUT, *, in_8_bits: bool = False) -> Moments:
    return Moments(layout, dtype=torch.float32, device="cpu", in_8_bits=in_8_bits)


def version_of(num_commits: int, *, value: float = 0.0, lineage: str = "a", layout: Layout = LAYOUT, saved: int = 0) -> Version:
    masters = torch.arange(layout.num_elements, dtype=torch.float32) + 100 * num_commits + value
    return make_version(record_of(num_commits, lineage, saved=saved), layout, masters, torch.float32)


def write(
    root: Path,
    stage: int,
    num_commits: int,
    *,
    value: float = 0.0,
    lineage: str = "a",
    config: RunConfig = CONFIG,
    layout: Layout = LAYOUT,
    previous: Version | None = None,
    saved: int = 0,
) -> Path:
    version = version_of(num_commits, value=value, lineage=lineage, layout=layout, saved=saved)
    optimizer = OptimizerState({"first": version.masters * 0.5, "second": version.masters * 0.25}, num_commits)
    state = StageState(version, optimizer, previous)
    return write_checkpoint(root, stage, state, moments_of(layout), config, config_bytes=b'{"verbatim":  1}')


def files(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", refuse)
    return


# ---------------------------------------------------------------------------------------------------- writing


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    directory = write(tmp_path, 1, 20, value=0.5)
    assert directory == tmp_path / "checkpoints" / "stage-1" / "step-00000020"
    (found,) = scan([tmp_path])
    version = version_of(20, value=0.5)
    assert (found.stage, found.record, found.config_bytes) == (1, version.record, b'{"verbatim":  1}')
    tensors = found.parameters()
    assert set(tensors) == {"weight", "bias"}
    flat = LAYOUT.flatten([tensors[name] for name in LAYOUT.names], dtype=torch.float32, device="cpu")
    assert torch.equal(flat, version.masters)


@pytest.mark.parametrize("with_previous", [False, True])
def test_the_whole_state_is_restored_as_it_was(tmp_path: Path, with_previous: bool) -> None:
    previous = version_of(19, value=0.25) if with_previous else None
    write(tmp_path, 0, 20, value=0.5, previous=previous)
    (found,) = scan([tmp_path])
    record = found.record.model_copy(update={"era": 4})
    state = found.state(moments_of(), record=record, dtype=torch.bfloat16, device="cpu")
    written = version_of(20, value=0.5)
    assert state.version.record == record
    assert torch.equal(state.version.masters, written.masters)
    assert state.version.parameters["bias"].dtype == torch.bfloat16
    assert torch.equal(state.optimizer.tensors["first"], written.masters * 0.5)
    assert torch.equal(state.optimizer.tensors["second"], written.masters * 0.25)
    assert state.optimizer.num_updates == 20
    if previous is None:
        assert state.previous is None
    else:
        assert state.previous is not None
        assert state.previous.record == previous.record
        assert torch.equal(state.previous.masters, previous.masters)


def test_a_state_in_8_bits_is_restored_to_the_bit(tmp_path: Path) -> None:
    layout = Layout.of(torch.nn.Linear(100, 7))
    moments, version = moments_of(layout, in_8_bits=True), version_of(20, layout=layout)
    first, second = torch.randn(layout.num_elements), torch.rand(layout.num_elements) ** 4
    written = moments.of_numbers({"first": first, "second": second}, 20)
    write_checkpoint(tmp_path, 0, StageState(version, written), moments, CONFIG, config_bytes=b"{}")
    (found,) = scan([tmp_path])
    state = found.state(moments, record=found.record, dtype=torch.float32, device="cpu")
    assert list(state.optimizer.tensors) == ["first", "first_scales", "second", "second_scales"]
    for name, tensor in written.tensors.items():
        assert torch.equal(state.optimizer.tensors[name], tensor), name
    numbers = numbers_of(found.moments())
    assert set(numbers) == {"first/weight", "first/bias", "second/weight", "second/bias"}
    named = layout.named(first)
    assert float((numbers["first/weight"] - named["weight"]).norm() / named["weight"].norm()) < 0.02
    with pytest.raises(StorageError, match="does not fit"):
        found.state(
            moments_of(Layout.of(torch.nn.Linear(99, 7)), in_8_bits=True), record=found.record, dtype=torch.float32, device="cpu"
        )


@pytest.mark.parametrize("other", [torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(3, 4), torch.nn.Conv1d(3, 2, 1)])
def test_a_checkpoint_of_another_model_is_a_storage_error(tmp_path: Path, other: torch.nn.Module) -> None:
    """Written by `other`, read by Linear(3, 2)."""
    write(tmp_path, 0, 20, layout=Layout.of(other))
    (found,) = scan([tmp_path])
    with pytest.raises(StorageError, match="does not fit"):
        found.state(moments_of(), record=found.record, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("name", ["parameters", "optimizer", "previous"])
def test_a_truncated_file_of_the_state_is_named(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, 0, 20, previous=version_of(19)) / f"{name}.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    (found,) = scan([tmp_path])
    with pytest.raises(StorageError) as raised:
        found.state(moments_of(), record=found.record, dtype=torch.float32, device="cpu")
    assert str(path) in str(raised.value)


def test_the_optimizer_is_written_with_its_digest(tmp_path: Path) -> None:
    directory = write(tmp_path, 0, 20)
    moments = load_file(directory / "optimizer.safetensors")
    assert set(moments) == {"first/weight", "first/bias", "second/weight", "second/bias"}
    assert torch.equal(moments["first/bias"], version_of(20).masters[6:] * 0.5)
    assert torch.equal(moments["second/weight"], version_of(20).masters[:6].view(2, 3) * 0.25)
    meta = json.loads((directory / "checkpoint.json").read_text())
    assert meta["num_updates"] == 20
    assert meta["blake3"]["optimizer"] == digest_of(moments[name] for name in sorted(moments))


def test_a_file_without_a_digest_is_refused_in_one_line(tmp_path: Path) -> None:
    description = write(tmp_path, 0, 20) / "checkpoint.json"
    meta = json.loads(description.read_text())
    del meta["digest"], meta["blake3"]["optimizer"]
    description.write_text(json.dumps({**meta, "digest": module._digest_of(meta)}))
    with pytest.raises(StorageError, match="no digest was written with it") as raised:
        scan([tmp_path])[0].moments()
    assert "\n" not in str(raised.value)


def test_a_scalar_parameter_is_written_and_read(tmp_path: Path) -> None:
    scalar = torch.nn.Module()
    scalar.scale = torch.nn.Parameter(torch.tensor(2.0))
    write(tmp_path, 0, 20, layout=Layout.of(scalar))
    (found,) = scan([tmp_path])
    assert found.parameters()["scale"].shape == ()


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept_for_each_stage(tmp_path: Path, keep: int) -> None:
    config = CONFIG.model_copy(update={"checkpoint_keep": keep})
    for num_commits in (5, 10, 100, 1000):
        for stage in (0, 1):
            write(tmp_path, stage, num_commits, config=config)
    for stage in (0, 1):
        kept = sorted(path.name for path in (tmp_path / "checkpoints" / f"stage-{stage}").iterdir())
        assert kept == [f"step-{n:08d}" for n in (5, 10, 100, 1000)[-keep:]]


def test_what_was_just_written_is_never_pruned(tmp_path: Path) -> None:
    """After a run was restored to an older head, the abandoned later steps must not push out the new ones."""
    for num_commits in (40, 60):
        write(tmp_path, 0, num_commits, lineage="a")
    directory = write(tmp_path, 0, 20, lineage="b")
    assert directory.is_dir()


def test_the_newest_that_every_stage_has_stays(tmp_path: Path) -> None:
    """However many of this stage alone follow it."""
    for num_commits, saved in ((10, 0), (20, 10), (30, 20), (40, 20), (50, 20), (60, 20)):
        write(tmp_path, 0, num_commits, saved=saved)
    assert saved_steps(tmp_path, 0, range(100)) == (20, 50, 60)
    write(tmp_path, 0, 70, saved=60)
    assert saved_steps(tmp_path, 0, range(100)) == (60, 70)
    write(tmp_path, 0, 80, saved=70)
    assert saved_steps(tmp_path, 0, range(100)) == (70, 80)
    assert saved_steps(tmp_path, 0, (70, 90)) == (70,)


def test_nothing_partial_remains(tmp_path: Path) -> None:
    write(tmp_path, 0, 20)
    names = sorted(path.name for path in (tmp_path / "checkpoints" / "stage-0").rglob("*"))
    assert names == ["checkpoint.json", "optimizer.safetensors", "parameters.safetensors", "step-00000020"]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_may_be_read_by_whom_the_umask_says(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        directory = write(tmp_path, 0, 20)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o666 & ~umask}


def test_a_directory_appears_only_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a reader, or a process killed at any of these moments, would find."""
    write(tmp_path, 0, 20)
    seen: list[list[int]] = []
    save, fsync = module.save_file, os.fsync

    def watch() -> None:
        seen.append([c.record.step + 1 for c in scan([tmp_path])])

    def watched_save(*args: object, **kwargs: object) -> None:
        watch()
        save(*args, **kwargs)  # type: ignore[arg-type]
        watch()

    def watched_fsync(handle: int) -> None:
        watch()
        fsync(handle)

    monkeypatch.setattr(module, "save_file", watched_save)
    monkeypatch.setattr(module.os, "fsync", watched_fsync)
    write(tmp_path, 0, 40)
    assert len(seen) >= 7
    assert all(steps == [20] for steps in seen)
    assert [c.record.step + 1 for c in scan([tmp_path])] == [20, 40]


def test_every_file_reaches_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(module.os, "fsync", lambda handle: (events.append("fsync"), fsync(handle))[1])
    monkeypatch.setattr(Path, "rename", lambda self, target: (events.append("rename"), rename(self, target))[1])
    write(tmp_path, 0, 20)
    assert events[: events.index("rename")].count("fsync") >= 3


def test_a_full_disk_is_one_clear_error_and_leaves_the_old_checkpoint(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    write(tmp_path, 0, 20)
    before = files(tmp_path)
    request.getfixturevalue("full_disk")
    with pytest.raises(StorageError, match="No space left on device") as raised:
        write(tmp_path, 0, 40)
    assert "step-00000040" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert files(tmp_path) == before


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_at_the_first_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        write(tmp_path, 0, 20)
    assert files(tmp_path) == {}
    assert scan([tmp_path]) == []


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_disk_that_fills_up_halfway_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    write(tmp_path, 0, 20)
    before = files(tmp_path)
    save, calls = module.save_file, iter(range(1, 10))

    def fill_up(tensors: dict[str, torch.Tensor], path: Path, **kwargs: object) -> None:
        save(tensors, path, **kwargs)  # type: ignore[arg-type]
        if next(calls) == fails_at:
            path.write_bytes(path.read_bytes()[:20])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", fill_up)
    with pytest.raises(StorageError):
        write(tmp_path, 0, 20)  # the same step again
    assert files(tmp_path) == before


def test_a_refused_rename_leaves_the_old_checkpoint_of_the_same_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 0, 20)
    before = files(tmp_path)

    def refuse(self: Path, target: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(StorageError, match="Read-only file system"):
        write(tmp_path, 0, 20, value=1.0)
    assert files(tmp_path) == before


def test_a_state_directory_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file is in the way")
    with pytest.raises(StorageError, match="cannot write checkpoint"):
        write(tmp_path / "state", 0, 20)
    assert (tmp_path / "state").read_text() == "a file is in the way"


def test_the_next_checkpoint_succeeds_after_a_failed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", lambda *args, **kwargs: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.raises(StorageError):
            write(tmp_path, 0, 20)
    write(tmp_path, 0, 20)
    (found,) = scan([tmp_path])
    assert found.parameters()["bias"].tolist() == [2006.0, 2007.0]


# ---------------------------------------------------------------------------------------------------- finding


def version_ids(found: list[StageCheckpoint]) -> set[str]:
    return {checkpoint.record.version_id for checkpoint in found}


def test_the_newest_complete_version_is_chosen(tmp_path: Path) -> None:
    for num_commits, stages in ((20, (0, 1, 2)), (40, (0, 1, 2)), (60, (0, 2))):
        for stage in stages:
            write(tmp_path / f"peer{stage}", stage, num_commits, config=CONFIG.model_copy(update={"checkpoint_keep": 9}))
    found = find_complete([tmp_path])
    assert [checkpoint.stage for checkpoint in found] == [0, 1, 2]
    assert version_ids(found) == {record_of(40, "a").version_id}
    asked = find_complete([tmp_path], step=20)
    assert version_ids(asked) == {record_of(20, "a").version_id}


def test_parts_are_gathered_from_several_directories(tmp_path: Path) -> None:
    for stage in range(3):
        write(tmp_path / f"peer{stage}", stage, 20)
    roots = [tmp_path / f"peer{stage}" for stage in (2, 0, 1)]
    assert [checkpoint.stage for checkpoint in find_complete(roots)] == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"at step 20 stages \[1\] are missing"):
        find_complete(roots[:2])


def test_missing_stages_of_the_newest_version_are_named(tmp_path: Path) -> None:
    write(tmp_path, 1, 20)
    write(tmp_path, 2, 20)
    write(tmp_path, 1, 40)
    with pytest.raises(ConfigError) as raised:
        find_complete([tmp_path])
    assert "at step 40 stages [0, 2] are missing" in str(raised.value)
    assert str(tmp_path) in str(raised.value)


def test_a_step_that_is_not_there_is_named(tmp_path: Path) -> None:
    for stage in range(3):
        write(tmp_path, stage, 20)
    with pytest.raises(ConfigError, match="of step 30"):
        find_complete([tmp_path], step=30)


def test_versions_are_never_mixed(tmp_path: Path) -> None:
    """Two lineages reached the same step; together they would make three stages."""
    write(tmp_path / "a", 0, 20, lineage="a")
    write(tmp_path / "a", 1, 20, lineage="a")
    write(tmp_path / "b", 2, 20, lineage="b")
    with pytest.raises(ConfigError, match="are missing"):
        find_complete([tmp_path])
    write(tmp_path / "c", 0, 20, lineage="b")
    write(tmp_path / "c", 1, 20, lineage="b")
    found = find_complete([tmp_path])
    assert version_ids(found) == {record_of(20, "b").version_id}
    assert [checkpoint.stage for checkpoint in found] == [0, 1, 2]


def test_checkpoints_of_two_runs_are_not_one_choice(tmp_path: Path) -> None:
    for stage in range(NUM_STAGES):
        write(tmp_path / "one", stage, 20)
        version = version_of(40)
        other = dataclasses.replace(version, record=version.record.model_copy(update={"run": "2" * 64}))
        optimizer = OptimizerState({"first": other.masters, "second": other.masters}, 40)
        write_checkpoint(tmp_path / "other", stage, StageState(other, optimizer), moments_of(), CONFIG, config_bytes=b"{}")
    with pytest.raises(ConfigError, match=r"checkpoints of 2 runs \(run 1{12}, .*one.*; run 2{12}, .*other.*\): name the dir"):
        find_complete([tmp_path])
    assert version_ids(find_complete([tmp_path / "one"])) == {record_of(20, "a").version_id}


def test_a_missing_directory_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: no such directory"):
        scan([tmp_path / "nowhere"])


def test_an_empty_directory_has_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint that is complete"):
        find_complete([tmp_path])


# ---------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("num_bytes", [0, 4, 40, -1])
def test_a_truncated_file_is_a_storage_error_that_names_it(tmp_path: Path, num_bytes: int) -> None:
    directory = write(tmp_path, 0, 20)
    path = directory / "parameters.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    (found,) = scan([tmp_path])
    with pytest.raises(StorageError) as raised:
        found.parameters()
    assert str(path) in str(raised.value)


def test_a_flipped_bit_is_a_storage_error_that_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, 0, 20) / "parameters.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    (found,) = scan([tmp_path])
    with pytest.raises(StorageError, match="the digest differs") as raised:
        found.parameters()
    assert str(path) in str(raised.value)


def test_a_missing_file_is_a_storage_error_that_names_it(tmp_path: Path) -> None:
    path = write(tmp_path, 0, 20) / "parameters.safetensors"
    (found,) = scan([tmp_path])
    path.unlink()
    with pytest.raises(StorageError) as raised:
        found.parameters()
    assert str(path) in str(raised.value)


def test_a_checkpoint_that_was_pruned_meanwhile_is_a_storage_error(tmp_path: Path) -> None:
    """Its peer goes on training and writes a newer one while somebody exports this one."""
    write(tmp_path, 0, 20)
    (found,) = scan([tmp_path])
    for num_commits in (40, 60):
        write(tmp_path, 0, num_commits)
    assert not found.directory.exists()
    with pytest.raises(StorageError) as raised:
        found.parameters()
    assert str(found.directory) in str(raised.value)


@pytest.mark.parametrize("how", ["missing", "a link to nowhere"])
def test_a_checkpoint_without_its_description_is_damaged(tmp_path: Path, how: str) -> None:
    """It appeared under its name when it was complete, so something was lost since."""
    path = write(tmp_path, 0, 20) / "checkpoint.json"
    write(tmp_path, 0, 40)
    path.unlink()
    if how != "missing":
        path.symlink_to(tmp_path / "nowhere")
    damaged: list[StorageError] = []
    assert [checkpoint.record.step + 1 for checkpoint in scan([tmp_path], damaged=damaged)] == [40]
    assert [str(error).split(" is damaged (")[0] for error in damaged] == [str(path)]
    with pytest.raises(StorageError, match="it is missing"):
        scan([tmp_path])


@pytest.mark.parametrize("name", ["checkpoint.json", "parameters.safetensors"])
def test_a_pipe_in_the_place_of_a_file_is_damage_and_not_waited_for(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, 0, 20) / name
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(StorageError, match="it is no file"):
        scan([tmp_path])[0].check()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("a link to itself", "Too many levels of symbolic links"),
        pytest.param("not readable", "Permission denied", marks=pytest.mark.skipif(os.geteuid() == 0, reason="root reads all")),
    ],
)
def test_a_file_that_the_system_does_not_open_is_told_in_its_words(tmp_path: Path, how: str, said: str) -> None:
    """Not as safetensors has it, which calls every such file missing."""
    path = write(tmp_path, 0, 20) / "parameters.safetensors"
    if how == "not readable":
        path.chmod(0)
    else:
        path.unlink()
        path.symlink_to(path)
    with pytest.raises(StorageError, match=re.escape(f"{path} is damaged ({said}): ")):
        scan([tmp_path])[0].parameters()


def test_a_record_that_is_none_is_told_in_one_line(tmp_path: Path) -> None:
    path = write(tmp_path, 0, 20) / "checkpoint.json"
    meta = json.loads(path.read_text())
    del meta["record"]["head"]
    rewrite(path, meta)
    with pytest.raises(StorageError, match=r"\(no description of a checkpoint: head: Field required\)"):
        scan([tmp_path])


def test_a_stage_directory_that_cannot_be_listed_is_told(tmp_path: Path) -> None:
    parent = tmp_path / "checkpoints" / "stage-0"
    parent.parent.mkdir()
    parent.write_text("no directory")
    damaged: list[StorageError] = []
    assert scan([tmp_path], stage=0, damaged=damaged) == []
    assert [str(error) for error in damaged] == [f"{parent} cannot be read: Not a directory"]


def test_what_only_looks_like_a_checkpoint_is_none_and_pushes_none_out(tmp_path: Path) -> None:
    kept = [write(tmp_path, 0, 20)]
    parent = kept[0].parent
    (parent / "step-00000077").write_text("a file")
    (parent / "step-00000099").symlink_to(tmp_path / "nowhere")
    for name in ("step-foo", "step-00000098.bak"):
        (parent / name).mkdir()
    kept.append(write(tmp_path, 0, 40))
    assert [checkpoint.directory for checkpoint in scan([tmp_path])] == kept


def write_copies(tmp_path: Path) -> None:
    """Two peers of each stage, both with the checkpoints of two steps."""
    for peer in ("a", "b"):
        for stage in range(NUM_STAGES):
            for num_commits in (20, 40):
                write(tmp_path / f"{stage}{peer}", stage, num_commits)


def cut_short(root: Path, stage: int, num_commits: int, *, file: str = "parameters.safetensors") -> Path:
    path = root / "checkpoints" / f"stage-{stage}" / f"step-{num_commits:08d}" / file
    path.write_bytes(path.read_bytes()[:-1])
    return path


def test_another_copy_takes_the_place_of_a_damaged_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_copies(tmp_path)
    damaged = [cut_short(tmp_path / "0a", 0, 40), cut_short(tmp_path / "2a", 2, 40)]
    found = use_complete([tmp_path], StageCheckpoint.parameters)
    assert [checkpoint.record.step + 1 for checkpoint, _ in found] == [40, 40, 40]
    assert [checkpoint.directory.parts[-4] for checkpoint, _ in found] == ["0b", "1a", "2b"]
    assert [tensors["bias"].tolist() for _, tensors in found] == [[4006.0, 4007.0]] * NUM_STAGES
    told = [record.getMessage() for record in caplog.records]
    assert [line.split(" is damaged (")[0] for line in told] == [str(path) for path in damaged]
    assert all(line.endswith("or name another; taking another copy") for line in told)


def test_where_no_copy_is_intact_the_checkpoint_before_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_copies(tmp_path)
    for peer in ("a", "b"):
        cut_short(tmp_path / f"1{peer}", 1, 40)
    found = use_complete([tmp_path], StageCheckpoint.parameters)
    assert [checkpoint.record.step + 1 for checkpoint, _ in found] == [20, 20, 20]
    assert "step 40 is in no other copy; taking another checkpoint" in caplog.records[-1].getMessage()
    last = cut_short(tmp_path / "1b", 1, 20, file="optimizer.safetensors")
    assert len(use_complete([tmp_path], StageCheckpoint.parameters)) == NUM_STAGES, "moments are not asked for"
    cut_short(tmp_path / "1a", 1, 20)
    with pytest.raises(StorageError) as raised:
        use_complete([tmp_path], StageCheckpoint.check)
    assert str(raised.value).startswith(f"{last} is damaged (")


def test_a_checkpoint_that_was_replaced_is_another(tmp_path: Path) -> None:
    write(tmp_path, 0, 20)
    (found,) = scan([tmp_path])
    assert found.is_there
    write(tmp_path, 0, 20, value=1.0)
    assert not found.is_there
    (found,) = scan([tmp_path])
    assert found.is_there
    for num_commits in (40, 60):
        write(tmp_path, 0, num_commits)
    assert not found.is_there


def test_a_copy_put_in_place_with_its_times_is_another(tmp_path: Path) -> None:
    path = write(tmp_path, 0, 20) / "parameters.safetensors"
    content, stat = path.read_bytes(), path.stat()
    (found,) = scan([tmp_path])
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert not found.is_there


def rewrite(path: Path, meta: dict[str, object]) -> None:
    """A description with another content, and the digest of that."""
    meta = {key: value for key, value in meta.items() if key != "digest"}
    path.write_text(json.dumps({**meta, "digest": blake3(json.dumps(meta, sort_keys=True).encode()).hexdigest()}))


WRONG_VALUES = {
    "record": ["nonsense", 3, [], None],
    "previous": ["nonsense", 3, []],
    "stage": ["nonsense", [], None],
    "num_updates": ["nonsense", [], None],
    "blake3": ["nonsense", 3, None],
    "config": [3, [], None],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG_VALUES.items() for value in values])
def test_a_wrong_field_of_a_description_is_a_storage_error_that_names_the_file(tmp_path: Path, field: str, value: object) -> None:
    path = write(tmp_path, 0, 20) / "checkpoint.json"
    rewrite(path, {**json.loads(path.read_text()), field: value})
    with pytest.raises(StorageError) as raised:
        scan([tmp_path])
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value), "an error is one line"


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", "null", "7", "[" * 200_000])
def test_a_damaged_description_is_a_storage_error_that_names_it(tmp_path: Path, content: str) -> None:
    """And says what is wrong in words that are not Python's."""
    path = write(tmp_path, 0, 20) / "checkpoint.json"
    path.write_text(content)
    with pytest.raises(StorageError) as raised:
        scan([tmp_path])
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "Error" not in str(raised.value)


@pytest.mark.parametrize(
    ("was", "becomes"), [('"num_updates": 20', '"num_updates": 80'), ('"era": 0', '"era": 4'), ("verbatim", "ferbatim")]
)
def test_a_description_that_was_altered_is_damaged(tmp_path: Path, was: str, becomes: str) -> None:
    """Though it still reads as one."""
    path = write(tmp_path, 0, 20) / "checkpoint.json"
    text = path.read_text()
    assert text.count(was) == 1
    path.write_text(text.replace(was, becomes))
    with pytest.raises(StorageError, match="digest differs"):
        scan([tmp_path])


def test_a_description_without_its_digest_is_refused(tmp_path: Path) -> None:
    """Who altered it may have left it out."""
    path = write(tmp_path, 0, 20) / "checkpoint.json"
    meta = json.loads(path.read_text())
    del meta["digest"]
    path.write_text(json.dumps(meta))
    with pytest.raises(StorageError, match=re.escape(f"{path} is damaged (no description of a checkpoint: it has no 'digest')")):
        scan([tmp_path])


def test_a_checkpoint_of_another_stage_is_not_taken(tmp_path: Path) -> None:
    """Somebody copied it into this one's directory."""
    other = write(tmp_path, 1, 20)
    there = write(tmp_path, 0, 10).parent / other.name
    other.rename(there)
    damaged: list[StorageError] = []
    assert [found.directory.name for found in scan([tmp_path], stage=0, damaged=damaged)] == ["step-00000010"]
    assert len(damaged) == 1
    assert str(there) in str(damaged[0])
    assert "it is of stage 1" in str(damaged[0])


def test_a_checkpoint_of_an_earlier_version_is_not_called_damaged(tmp_path: Path) -> None:
    path = write(tmp_path, 0, 20) / "checkpoint.json"
    meta = json.loads(path.read_text())
    meta["digests"] = meta.pop("blake3")
    path.write_text(json.dumps(meta))
    with pytest.raises(StorageError, match="was written by an earlier version"):
        scan([tmp_path])


def test_a_peer_refuses_a_directory_that_holds_another_run(tmp_path: Path) -> None:
    """It would prune what it finds there."""
    require_own(tmp_path / "none", "2" * 64)
    write(tmp_path, 0, 20)
    require_own(tmp_path, "1" * 64)
    with pytest.raises(ConfigError, match=r"holds a checkpoint of another run \(111111111111, step-00000020\)"):
        require_own(tmp_path, "2" * 64)


def test_the_best_checkpoint_outlives_newer_ones_and_is_found(tmp_path: Path) -> None:
    for stage in range(NUM_STAGES):
        for num_commits, loss in ((10, 2.0), (20, 1.5), (30, None), (40, None), (50, None)):
            written = write(tmp_path, stage, num_commits)
            if loss is not None:
                mark_best(written, loss)
        kept = sorted(path.name for path in written.parent.glob("step-*"))
        assert kept == ["step-00000020", "step-00000040", "step-00000050"]
    assert [c.record.step + 1 for c in find_complete([tmp_path], best=True)] == [20] * NUM_STAGES
    assert {c.best_loss for c in find_complete([tmp_path], best=True)} == {1.5}
    assert [c.record.step + 1 for c in find_complete([tmp_path])] == [50] * NUM_STAGES


def test_of_several_peers_bests_the_lowest_that_is_complete_is_found(tmp_path: Path) -> None:
    for stage in range(NUM_STAGES):
        mark_best(write(tmp_path / "a", stage, 10), 2.0)
        mark_best(write(tmp_path / "b", stage, 20), 1.9)
    mark_best(write(tmp_path / "c", 0, 30), 1.0)
    assert {c.record.step + 1 for c in find_complete([tmp_path], best=True)} == {20}
    with pytest.raises(ConfigError, match="no checkpoint with an evaluation"):
        find_complete([Path(write(tmp_path / "d", 1, 10)).parents[2]], best=True)
