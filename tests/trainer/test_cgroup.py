"""What the control groups allow this process, in both of their versions and in any namespace."""

from pathlib import Path

import pytest

from bamboo_trainer.memory.cgroup import HostMemory, host_memory

NO_LIMIT_1 = "9223372036854771712"


def written(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def version_2(folder: Path, limit: str, used: int, cache: int = 0) -> None:
    stat = f"anon 1\nfile 99\ninactive_file {cache}\nactive_file 5"
    written(folder, {"memory.max": limit, "memory.current": str(used), "memory.stat": stat})


def version_1(folder: Path, limit: str, used: int, cache: int = 0) -> None:
    stat = f"inactive_file 1\ntotal_inactive_file {cache}"
    files = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": str(used), "memory.stat": stat}
    written(folder, files)


@pytest.mark.parametrize(
    ("groups", "folder"),
    [
        ("0::/\n", ""),  # a container with a namespace of its own
        ("0::/kubepods/pod1/c1\n", ""),  # one that sees the host's names, but only its own folder
        ("0::/kubepods/pod1/c1\n", "kubepods/pod1/c1"),
        ("0::/kubepods/pod1/c1\n", "kubepods/pod1"),  # the limit of the pod
    ],
)
def test_version_2(tmp_path: Path, groups: str, folder: str) -> None:
    version_2(tmp_path / "root" / folder, "1000", 700, cache=200)
    (tmp_path / "groups").write_text(groups)
    assert host_memory(tmp_path / "root", tmp_path / "groups") == HostMemory(1000, 500)


@pytest.mark.parametrize("folder", ["memory", "memory/kubepods/c1"])
def test_version_1(tmp_path: Path, folder: str) -> None:
    version_1(tmp_path / "root" / folder, "1000", 700, cache=300)
    (tmp_path / "groups").write_text("9:name=systemd:/\n4:memory:/kubepods/c1\n3:cpu,cpuacct:/x\n")
    assert host_memory(tmp_path / "root", tmp_path / "groups") == HostMemory(1000, 400)


def test_of_several_limits_the_one_counts_of_which_least_is_left(tmp_path: Path) -> None:
    version_2(tmp_path / "pod", "1000", 950)
    version_2(tmp_path / "pod/c1", "500", 100)
    (tmp_path / "groups").write_text("0::/pod/c1\n")
    assert host_memory(tmp_path, tmp_path / "groups") == HostMemory(1000, 950)


@pytest.mark.parametrize("limit", ["max", "", "-1", "many"])
def test_without_a_limit_none_is_known(tmp_path: Path, limit: str) -> None:
    version_2(tmp_path, limit, 700)
    version_1(tmp_path / "memory", NO_LIMIT_1, 700)
    assert host_memory(tmp_path, tmp_path / "none") is None
    assert host_memory(tmp_path / "none", tmp_path / "none") is None


def test_what_is_read_here_is_sound() -> None:
    """Of the machine that runs the tests."""
    found = host_memory()
    assert found is None or found.used > 0


def test_a_tenth_of_the_limit_is_left_alone() -> None:
    memory = HostMemory(limit=1000, used=600)
    assert [memory.has_room(more) for more in (300, 301)] == [True, False]
    assert memory.has_room(400, freed=100)
