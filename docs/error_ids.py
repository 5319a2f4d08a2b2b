"""Lists every condition of the error family by its id: writes docs/error-ids.md, or compares it with ``--check``.

A condition has one id and one text, wherever it is found; the first digit is its class. What the sources say is read
from them: in Python a call of an error class with ``id=``, in C++ a call of a function of base/error.h.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/error-ids.md"
# By the first digit of an id.
CLASSES = {
    1: ("InvalidParamError",),
    2: ("InvalidTensorError",),
    3: ("PeerMismatchError",),
    4: ("PeerLostError", "CommTimeoutError", "DeadlockError"),
    5: ("BackendUnavailableError", "ResourceError", "OutOfMemoryError"),
    6: ("ValueOverflowError",),
    7: ("HcclError",),
}
FUNCTIONS = {
    "invalid_param": "InvalidParamError",
    "invalid_tensor": "InvalidTensorError",
    "peer_mismatch": "PeerMismatchError",
    "peer_lost": "PeerLostError",
    "comm_timeout": "CommTimeoutError",
    "deadlock": "DeadlockError",
    "backend_unavailable": "BackendUnavailableError",
    "resource_error": "ResourceError",
    "resource": "ResourceError",
    "hccl": "HcclError",
    "value_overflow": "ValueOverflowError",
}
VALUE = "…"
# What the sentence is where it has been put together elsewhere.
COMPOSED = {
    1030: "… (what Python raised in a function that the core called)",
    1478: "… (what a rank's call of the emulated HCCL was refused for)",
    1479: "call … of the communicator begins when … are done: nothing orders their streams",
    1480: "… is …, expected … on … (what a product's operator takes; ALLTOALLV_NPU_LIMITS=relax lets it pass)",
    1481: "rank … is process …, which has not been started with this rank, process …: two jobs have one address; "
    "give each job its own",
    1482: "… is …, but a graph on a CPU cannot hold a tensor without elements",
    3028: "operator #… of domain …: rank 0 has … …, rank … has … … (options of a dispatch)",
    4011: "… failed on rank …: … (a failure of a class that this release does not know)",
    4012: "… waited … s for rank …",
    4013: "ranks wait for each other: …",
    4014: "…: rank … was lost: …",
    4027: "rank 0 waited … s for rank … to join domain '…' at port …",
    4028: "rank … waited … s for rank 0 of domain '…' at …",
    4029: "rank … was lost while it joined: its connection has ended",
    4048: "… waited … s for rank … to join",
    4049: "…: rank … aborted: …",
    5003: "… (what Python or torch raised for want of memory)",
    5018: "…: rank … failed in …: no memory",
    5066: "…: … (the system's text: memory, descriptors, threads or space have run out)",
    5067: "…: … (the system's text of a call that failed)",
    5068: "…: rank … failed in …: a resource has run out",
    6003: "a row of the input holds a value that … cannot",
    7003: "…: … returned …: … (CANN's text)",
    7007: "the NPU cannot report whether an asynchronous call is done: …",
}


@dataclass(frozen=True)
class Condition:
    """A place that raises: the text has `VALUE` where a value stands."""

    file: Path
    line: int
    kind: str
    ids: tuple[int, ...]
    text: str


def has_words(text: str) -> bool:
    """Whether the text, or only what surrounds another text, is written here."""
    return re.search("[a-z]{3}", text) is not None


def python_text(node: ast.expr) -> str:
    """Returns the text of an expression."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(python_text, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return python_text(node.left) + python_text(node.right)
    return VALUE


def python_conditions(file: Path) -> Iterator[Condition]:
    """Yields the calls of error classes."""
    kinds = {kind for names in CLASSES.values() for kind in names}
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name not in kinds:
            continue
        ids = [int(ast.literal_eval(each.value)) for each in node.keywords if each.arg == "id"]
        yield Condition(file, node.lineno, name, tuple(ids), python_text(node.args[0]) if node.args else "")


def cpp_arguments(source: str, start: int) -> list[str]:
    """Returns the arguments of the call whose parenthesis is at ``start``."""
    found, depth, begin = list[str](), 0, start + 1
    for token in re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)\'|[(){}\[\],]').finditer(source, start):
        mark = token[0]
        if mark in "([{":
            depth += 1
        elif mark in ")]}":
            depth -= 1
        if depth == 0 or (mark == "," and depth == 1):
            found.append(source[begin : token.start()])
            begin = token.end()
        if depth == 0:
            break
    return found


def cpp_text(argument: str) -> str:
    """Returns the text of an argument: its literals that no call or choice contains."""
    text, depth, value = "", 0, ""
    for token in re.finditer(
        r'"((?:[^"\\]|\\.)*)"|[(\[{]|[)\]}]|\+|[^"+(){}\[\]]+', argument.replace('std::string("', '("')
    ):
        mark = token[0]
        if depth == 0 and token[1] is not None and not value.strip():
            text += token[1].replace('\\"', '"')
        elif depth == 0 and mark == "+":
            text, value = text + VALUE * bool(value.strip()), ""
        else:
            depth += (mark in "([{") - (mark in ")]}")
            value += mark
    return text + VALUE * bool(value.strip())


def cpp_conditions(file: Path) -> Iterator[Condition]:
    """Yields the calls of functions that make errors."""
    source = file.read_text()
    for found in re.finditer(rf"^(?!.*//.*).*?\b({'|'.join(FUNCTIONS)}|with_id)\(", source, re.MULTILINE):
        arguments = cpp_arguments(source, found.end() - 1)
        ids = tuple(map(int, re.findall(r"\b[1-9]\d{3}\b", arguments[0])))
        texts = [each for each in arguments[1:] if not each.strip().startswith("ErrorType::")]
        line = source.count("\n", 0, found.start(1)) + 1
        named = re.findall(r"ErrorClass::(\w+)", source[: found.start(1)])  # of what is made without a function
        kind = FUNCTIONS.get(found[1]) or FUNCTIONS[named[-1]]
        yield Condition(file, line, kind, ids, "".join(map(cpp_text, texts)))


def conditions() -> list[Condition]:
    """Returns every place of the package that makes an error of the family."""
    found = list[Condition]()
    for file in sorted((ROOT / "python").rglob("*.py")):
        found += python_conditions(file)
    for file in sorted(each for room in ("op_host", "op_kernel", "emulator") for each in (ROOT / room).rglob("*")):
        if file.suffix in (".cpp", ".h") and file != ROOT / "op_host/runtime/base/error.h":
            found += cpp_conditions(file)
    return [
        Condition(each.file, each.line, each.kind, each.ids, re.sub(f"{VALUE}+", VALUE, each.text).strip())
        for each in found
    ]


def faults(found: list[Condition]) -> Iterator[str]:
    """Yields what is wrong with the ids."""
    by_text, by_id = defaultdict[tuple[str, str], set[int]](set), defaultdict[int, set[str]](set)
    for each in found:
        where = f"{each.file.relative_to(ROOT)}:{each.line}"
        if not each.ids and has_words(each.text):
            yield f"{where}: {each.kind} has no id: {each.text!r}; free are {', '.join(free(each.kind, found))}"
        for number in each.ids:
            if each.kind not in CLASSES.get(number // 1000, ()):
                yield f"{where}: {number} is no id of {each.kind}"
            if not has_words(each.text) and number not in COMPOSED:
                yield f"{where}: docs/error_ids.py has no text for {number}"
            if has_words(each.text):
                by_text[each.kind, each.text].add(number)
                by_id[number].add(each.text)
    yield from (f"ids {sorted(ids)} have one text: {text!r}" for (_, text), ids in by_text.items() if len(ids) > 1)
    yield from (f"id {number} has several texts: {sorted(texts)}" for number, texts in by_id.items() if len(texts) > 1)


def free(kind: str, found: list[Condition]) -> Iterator[str]:
    """Yields the next id of a class: one that has been in use does not come back with another meaning."""
    taken = {number for each in found for number in each.ids}
    digits = [digit for digit, kinds in CLASSES.items() if kind in kinds]
    yield from (str(max((n for n in taken if n // 1000 == d), default=1000 * d) + 1) for d in digits)


def page(found: list[Condition]) -> str:
    """Returns docs/error-ids.md."""
    texts, kinds = dict(COMPOSED), defaultdict[int, set[str]](set)
    for each in found:
        for number in each.ids:
            texts.setdefault(number, each.text)
            kinds[number].add(each.kind)
    lines = [
        "# Errors by id",
        "",
        "The message of every [error](errors.md) of `alltoallv.errors` ends with the id of its condition, such as",
        "`[A2A-1083]`, and `error.id` is that text. An id stays when its sentence is reworded, so programs, tests and",
        "searches may rely on it. An error that tells of another one, such as a peer's, has the id of the cause.",
        f"`{VALUE}` stands for a value. `python docs/error_ids.py` writes this page from the sources.",
    ]
    for digit, classes in CLASSES.items():
        lines += ["", f"## {', '.join(classes)}", ""]
        several = len(classes) > 1
        lines += ["| id | class | message |", "|---|---|---|"] if several else ["| id | message |", "|---|---|"]
        for number in sorted(number for number in texts if number // 1000 == digit):
            text = re.sub(r"([|*_<\[\]`])", r"\\\1", texts[number])
            kind = f" {', '.join(sorted(kinds[number]))} |" if several else ""
            lines.append(f'| <a id="a2a-{number}"></a>A2A-{number} |{kind} {text} |')
    return "\n".join(lines) + "\n"


def main() -> int:
    """Writes or compares the page; returns 1 if an id is wrong or the page is not that of the sources."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the page instead of writing it")
    checks = parser.parse_args().check
    found = conditions()
    wrong = list(faults(found))
    if checks and PAGE.read_text() != page(found):
        wrong.append("docs/error-ids.md is not that of the sources: run python docs/error_ids.py")
    if not checks and not wrong:
        PAGE.write_text(page(found))
    print("\n".join(wrong) or f"{len({number for each in found for number in each.ids})} conditions, each with its id")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
