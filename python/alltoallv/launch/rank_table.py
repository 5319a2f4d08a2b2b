"""Rank tables: the JSON file in which Ascend clusters state which rank uses which device of which server.

Formats 1.0 (``server_list``) and 1.2 (also with ``super_pod_list``). Numbers are written as strings.
"""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alltoallv.errors import InvalidParamError
from alltoallv.launch.variables import utf8

_VERSIONS = ("1.0", "1.2")


@dataclass(frozen=True)
class Device:
    """One rank: its number, and its device's number on its server.

    ``ip`` may be empty where all devices reach each other otherwise: on one server, in format 1.2 in one super pod.
    ``super_device`` is the device's number in its super pod, which format 1.2 has.
    """

    rank: int
    device: int
    ip: str = ""
    super_device: int | None = None


@dataclass(frozen=True)
class Server:
    """One host and its ranks, in ascending order."""

    server_id: str
    devices: tuple[Device, ...]


@dataclass(frozen=True)
class RankTable:
    """A checked rank table: ranks are 0..size-1, each once, and consecutive on every server; devices have addresses by
    which HCCL reaches them, once each; in format 1.2 every server belongs to one super pod.

    ``digest`` is a hash of the file's content.
    """

    version: str
    servers: tuple[Server, ...]
    digest: str

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(len(server.devices) for server in self.servers)

    def server_of(self, rank: int) -> Server:
        """Returns the server that holds ``rank``."""
        for server in self.servers:
            if any(device.rank == rank for device in server.devices):
                return server
        raise InvalidParamError(
            f"rank is {rank}, expected 0 <= rank < {self.size}, the ranks of the rank table", id=1270
        )

    def of_size(self, size: int) -> RankTable:
        """Returns this table; raises unless it has ``size`` ranks."""
        if self.size != size:
            raise InvalidParamError(f"the rank table lists {self.size} ranks, expected {size}", id=1271)
        return self

    @classmethod
    def load(cls, path: str) -> RankTable:
        """Reads ``path``; raises InvalidParamError unless it is a usable rank table."""
        try:
            # Nobody may ever write to a pipe.
            with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise OSError(errno.EINVAL, "it is not a regular file")
                content = file.read()
        except OSError as error:
            raise InvalidParamError(f"rank table {path!r} cannot be read: {error.strerror}", id=1272) from None
        except ValueError as error:  # it is no path
            raise InvalidParamError(f"rank table {path!r} cannot be read: {error}", id=1272) from None
        try:
            return cls.parse(content)
        except InvalidParamError as error:
            raise InvalidParamError(f"rank table {path!r}: {error}", id=1273) from None

    @classmethod
    def parse(cls, content: bytes) -> RankTable:
        """Checks and returns the rank table in a file's content; raises like `load`."""
        try:
            root = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise InvalidParamError(f"expected JSON, but {error}", id=1274) from None
        if not isinstance(root, dict):
            raise InvalidParamError(f"expected a JSON object, got {type(root).__name__}", id=1275)
        if root.get("status") != "completed":
            raise InvalidParamError(f"status is {root.get('status')!r}, expected 'completed'", id=1276)
        version = root.get("version", "1.0")
        if version not in _VERSIONS:
            raise InvalidParamError(f"version is {version!r}, expected '1.0' or '1.2'", id=1277)
        entries = _list(root, "server_list", "the rank table")
        if "server_count" in root and _number(root, "server_count", "the rank table") != len(entries):
            raise InvalidParamError(
                f"server_count is {root['server_count']!r}, but server_list has {len(entries)}", id=1278
            )
        servers = tuple(_server(entry, version) for entry in entries)
        _check(servers)
        islands = len(servers)
        if version == "1.2":
            islands = len(_super_pods(root, servers))
        _check_addresses(servers, needed=islands > 1)
        return cls(version, servers, hashlib.sha256(content).hexdigest()[:16])


def _server(entry: Any, version: str) -> Server:
    if not isinstance(entry, dict):
        raise InvalidParamError(f"server_list holds {entry!r}, expected an object", id=1279)
    name = entry.get("server_id")
    if not isinstance(name, str) or not 0 < len(name) <= 64:
        raise InvalidParamError(f"server_id is {name!r}, expected a text of 1 to 64 characters", id=1280)
    utf8("server_id", name)
    where = f"server {name!r}"
    devices = []
    for item in _list(entry, "device", where):
        if not isinstance(item, dict):
            raise InvalidParamError(f"device of {where} holds {item!r}, expected an object", id=1281)
        if "device_port" in item and not 1 <= _number(item, "device_port", where) <= 65535:
            raise InvalidParamError(f"device_port of {where} is {item['device_port']!r}, expected 1 to 65535", id=1282)
        devices.append(
            Device(
                _number(item, "rank_id", where),
                _number(item, "device_id", where),
                _address(item, where),
                _number(item, "super_device_id", f"rank {item['rank_id']} on {where}") if version == "1.2" else None,
            )
        )
    return Server(name, tuple(sorted(devices, key=lambda device: device.rank)))


def _check(servers: tuple[Server, ...]) -> None:
    names = [server.server_id for server in servers]
    if len(set(names)) != len(names):
        raise InvalidParamError(f"server_id values are {names}, expected each once", id=1283)
    ranks = sorted(device.rank for server in servers for device in server.devices)
    if ranks != list(range(len(ranks))):
        raise InvalidParamError(f"rank_id values are {ranks}, expected 0 to {len(ranks) - 1}, each once", id=1284)
    for server in servers:
        ranks = [device.rank for device in server.devices]
        if ranks[-1] - ranks[0] != len(ranks) - 1:
            raise InvalidParamError(
                f"ranks of server {server.server_id!r} are {ranks}, expected consecutive numbers", id=1285
            )
        numbers = [device.device for device in server.devices]
        if len(set(numbers)) != len(numbers):
            raise InvalidParamError(
                f"device_id values of server {server.server_id!r} are {numbers}, expected each once", id=1286
            )


def _check_addresses(servers: Sequence[Server], needed: bool) -> None:
    owners: dict[str, str] = {}
    for server in servers:
        for device in server.devices:
            who = f"rank {device.rank} on server {server.server_id!r}"
            if needed and not device.ip:
                raise InvalidParamError(
                    f"device_ip of {who} is '', expected its address: other servers need it", id=1287
                )
            if device.ip and owners.setdefault(device.ip, who) != who:
                raise InvalidParamError(
                    f"device_ip of {who} is {device.ip!r}, which {owners[device.ip]} also has", id=1288
                )


def _super_pods(root: dict[str, Any], servers: Sequence[Server]) -> list[str]:
    """Returns the super pods' names; every server is in one of them, where its devices' numbers are unique."""
    by_name = {server.server_id: server for server in servers}
    pods: list[str] = []
    pod_of: dict[str, str] = {}
    for entry in _list(root, "super_pod_list", "the rank table"):
        pod = entry.get("super_pod_id") if isinstance(entry, dict) else None
        if not isinstance(pod, str) or not pod or pod in pods:
            raise InvalidParamError(f"super_pod_id is {pod!r}, expected a text that no other super pod has", id=1289)
        pods.append(pod)
        numbers: dict[int | None, str] = {}
        for member in _list(entry, "server_list", f"super pod {pod!r}"):
            name = member.get("server_id") if isinstance(member, dict) else member
            if not isinstance(name, str) or name not in by_name:
                raise InvalidParamError(
                    f"super pod {pod!r} names server {name!r}, expected one of {sorted(by_name)}", id=1290
                )
            if name in pod_of:
                raise InvalidParamError(
                    f"server {name!r} is in super pod {pod_of[name]!r} and again in {pod!r}", id=1291
                )
            pod_of[name] = pod
            for device in by_name[name].devices:
                who = f"rank {device.rank} on server {name!r}"
                if numbers.setdefault(device.super_device, who) != who:
                    raise InvalidParamError(
                        f"super_device_id of {who} is {device.super_device}, "
                        f"which {numbers[device.super_device]} of super pod {pod!r} also has",
                        id=1292,
                    )
    for name in by_name:
        if name not in pod_of:
            raise InvalidParamError(f"server {name!r} is in no super pod, expected it in one of {pods}", id=1293)
    return pods


def _address(item: dict[str, Any], where: str) -> str:
    """Returns device_ip, which may be missing."""
    value = item.get("device_ip", "")
    try:
        if not isinstance(value, str):
            raise ValueError
        return str(ipaddress.ip_address(value)) if value != "" else ""
    except ValueError:
        raise InvalidParamError(
            f"device_ip of rank {item['rank_id']} on {where} is {value!r}, expected an address such as '10.0.0.1'",
            id=1294,
        ) from None


def _list(entry: dict[str, Any], key: str, where: str) -> list[Any]:
    value = entry.get(key)
    if not isinstance(value, list) or not value:
        raise InvalidParamError(f"{key} of {where} is {value!r}, expected a list that is not empty", id=1295)
    return value


def _number(entry: dict[str, Any], key: str, where: str) -> int:
    value = entry.get(key)
    if not isinstance(value, str) or not (value.isascii() and value.isdecimal()):
        raise InvalidParamError(
            f'{key} of {where} is {value!r}, expected a number written as a string, such as "0"', id=1296
        )
    if len(value) > 10:
        raise InvalidParamError(f"{key} of {where} is {value[:40]!r}, expected a number of at most 10 digits", id=1297)
    return int(value)
