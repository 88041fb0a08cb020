"""Two groups for NCCL's collectives, where they are faster than one."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
from on_ranks import on_ranks

from shardstep.comm import connect, hosts
from shardstep.comm.hosts import num_parallel_groups, over_plain_sockets


# The ranks of these tests are on one machine.
@pytest.mark.parametrize(
    ("names", "cores", "local", "plain", "expected"),
    [
        (["a", "b"], [10, 10], "1", [True, True], 2),
        (["a", "a"], [10, 10], "1", [True, True], 1),
        (["a", "b"], [10, 9], "1", [True, True], 1),
        (["a", "b"], [20, 20], "4", [True, True], 2),
        (["a", "b"], [19, 19], "4", [True, True], 1),
        (["a", "b"], [10, 10], "1", [False, True], 1),
    ],
)
@on_ranks(2)
def test_all_ranks_make_two_groups_if_all_have_cores_for_them(
    names: list[str], cores: list[int], local: str, plain: list[bool], expected: int
) -> None:
    comm = connect(None)
    rank = comm.group_rank
    with (
        mock.patch.dict(os.environ, NCCL_HOSTID=names[rank], LOCAL_WORLD_SIZE=local),
        mock.patch.object(hosts, "num_cores", return_value=cores[rank]),
        mock.patch.object(hosts, "over_plain_sockets", return_value=plain[rank]),
    ):
        assert num_parallel_groups(comm) == expected


RDMA, AMAZON, OTHER = ("infiniband/mlx5_0", ""), "0x1d0f\n", "0x8086\n"


@pytest.mark.parametrize(
    ("files", "settings", "plain"),
    [
        ([], {}, True),
        ([], {"NCCL_SOCKET_NTHREADS": "4"}, False),
        ([RDMA], {}, False),
        ([RDMA], {"NCCL_IB_DISABLE": "1"}, True),
        ([RDMA], {"NCCL_NET": "Socket"}, True),
        ([], {"NCCL_NET": "AWS Libfabric"}, False),
        ([("net/eth0/device/vendor", OTHER)], {}, True),
        ([("net/eth0/device/vendor", AMAZON)], {}, False),
        ([("net/eth0/device/vendor", AMAZON)], {"NCCL_SOCKET_IFNAME": "lo"}, True),
        ([("net/eth0/device/vendor", AMAZON)], {"NCCL_SOCKET_IFNAME": "=eth0,eth1"}, False),
        ([("net/eth0/device/vendor", AMAZON)], {"NCCL_SOCKET_IFNAME": "^docker"}, False),
    ],
)
def test_plain_sockets_are_told_from_rdma_and_from_sockets_with_more_threads(
    files: list[tuple[str, str]], settings: dict[str, str], plain: bool, tmp_path: Path
) -> None:
    for name, text in files:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    others = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
    with (
        mock.patch.dict(os.environ, others | settings, clear=True),
        mock.patch.object(hosts, "DEVICES", tmp_path),
    ):
        assert over_plain_sockets() is plain
