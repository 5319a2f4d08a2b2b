"""Rank tables: the JSON file with which Ascend clusters say which rank uses which device of which server.

Formats 1.0 (``server_list``) and 1.2 (the same plus ``super_pod_list``). Numbers are written as strings.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from alltoallv.errors import InvalidParamError

_VERSIONS = ("1.0", "1.2")


@dataclass(frozen=True)
class Device:
    """One rank: its number and its device's number on its server; ``ip`` may be empty on a single server."""

    rank: int
    device: int
    ip: str = ""


@dataclass(frozen=True)
class Server:
    """One host and its ranks, in ascending order."""

    server_id: str
    devices: tuple[Device, ...]


@dataclass(frozen=True)
class RankTable:
    """A checked rank table: ranks are 0..size-1, each once, and consecutive on every server.

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
        """The server that holds ``rank``."""
        for server in self.servers:
            if any(device.rank == rank for device in server.devices):
                return server
        raise InvalidParamError(f"rank is {rank}, expected 0 <= rank < {self.size}, the ranks of the rank table")

    @classmethod
    def load(cls, path: str) -> RankTable:
        """Reads and checks ``path``.

        Raises:
            InvalidParamError: the file cannot be read, is not JSON, or is not a usable rank table.
        """
        try:
            with open(path, "rb") as file:
                content = file.read()
        except OSError as error:
            raise InvalidParamError(f"rank table {path!r} cannot be read: {error.strerror}") from None
        try:
            return cls.parse(content)
        except InvalidParamError as error:
            raise InvalidParamError(f"rank table {path!r}: {error}") from None

    @classmethod
    def parse(cls, content: bytes) -> RankTable:
        """The same for a file's content."""
        try:
            root = json.loads(content)
        except ValueError as error:
            raise InvalidParamError(f"expected JSON, but {error}") from None
        if not isinstance(root, dict):
            raise InvalidParamError(f"expected a JSON object, got {type(root).__name__}")
        if root.get("status") != "completed":
            raise InvalidParamError(f"status is {root.get('status')!r}, expected 'completed'")
        version = root.get("version", "1.0")
        if version not in _VERSIONS:
            raise InvalidParamError(f"version is {version!r}, expected '1.0' or '1.2'")
        entries = _list(root, "server_list", "the rank table")
        if "server_count" in root and _number(root, "server_count", "the rank table") != len(entries):
            raise InvalidParamError(f"server_count is {root['server_count']!r}, but server_list has {len(entries)}")
        servers = tuple(_server(entry) for entry in entries)
        _check(servers)
        if version == "1.2":
            _check_super_pods(root, {server.server_id for server in servers})
        return cls(version, servers, hashlib.sha256(content).hexdigest()[:16])


def _server(entry: Any) -> Server:
    if not isinstance(entry, dict):
        raise InvalidParamError(f"server_list holds {entry!r}, expected an object")
    name = entry.get("server_id")
    if not isinstance(name, str) or not 0 < len(name) <= 64:
        raise InvalidParamError(f"server_id is {name!r}, expected a text of 1 to 64 characters")
    where = f"server {name!r}"
    devices = []
    for item in _list(entry, "device", where):
        if not isinstance(item, dict):
            raise InvalidParamError(f"device of {where} holds {item!r}, expected an object")
        if "device_port" in item and not 1 <= _number(item, "device_port", where) <= 65535:
            raise InvalidParamError(f"device_port of {where} is {item['device_port']!r}, expected 1 to 65535")
        devices.append(
            Device(
                _number(item, "rank_id", where),
                _number(item, "device_id", where),
                str(item.get("device_ip", "")),
            )
        )
    return Server(name, tuple(sorted(devices, key=lambda device: device.rank)))


def _check(servers: tuple[Server, ...]) -> None:
    names = [server.server_id for server in servers]
    if len(set(names)) != len(names):
        raise InvalidParamError(f"server_id values are {names}, expected each once")
    ranks = sorted(device.rank for server in servers for device in server.devices)
    if ranks != list(range(len(ranks))):
        raise InvalidParamError(f"rank_id values are {ranks}, expected 0 to {len(ranks) - 1}, each once")
    for server in servers:
        ranks = [device.rank for device in server.devices]
        if ranks[-1] - ranks[0] != len(ranks) - 1:
            raise InvalidParamError(f"ranks of server {server.server_id!r} are {ranks}, expected consecutive numbers")
        numbers = [device.device for device in server.devices]
        if len(set(numbers)) != len(numbers):
            raise InvalidParamError(
                f"device_id values of server {server.server_id!r} are {numbers}, expected each once"
            )


def _check_super_pods(root: dict[str, Any], names: set[str]) -> None:
    for pod in _list(root, "super_pod_list", "the rank table"):
        for member in _list(pod, "server_list", "super_pod_list") if isinstance(pod, dict) else [pod]:
            name = member.get("server_id") if isinstance(member, dict) else member
            if name not in names:
                raise InvalidParamError(f"super_pod_list names server {name!r}, expected one of {sorted(names)}")


def _list(entry: dict[str, Any], key: str, where: str) -> list[Any]:
    value = entry.get(key)
    if not isinstance(value, list) or not value:
        raise InvalidParamError(f"{key} of {where} is {value!r}, expected a list that is not empty")
    return value


def _number(entry: dict[str, Any], key: str, where: str) -> int:
    value = entry.get(key)
    if not isinstance(value, str) or not (value.isascii() and value.isdecimal()):
        raise InvalidParamError(f'{key} of {where} is {value!r}, expected a number written as a string, such as "0"')
    return int(value)
