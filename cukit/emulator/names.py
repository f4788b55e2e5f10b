"""Names of variables by address, and of parameters, from a kernel's debug information.

cukit's kernels are built with line numbers only; when there is a fault to report, a second
compilation adds the names and types of variables.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

_ENTRY = re.compile(r" <(\d+)><([0-9a-f]+)>: Abbrev Number: \d+ \((DW_TAG_\w+)\)")
_ATTRIBUTE = re.compile(r"    <[0-9a-f]+>\s+(DW_AT_\w+)\s*: (.*)")
_INDIRECT = re.compile(r"\(indirect (?:line )?string, offset: 0x[0-9a-f]+\): ")
_STRUCTURES = ("DW_TAG_structure_type", "DW_TAG_class_type", "DW_TAG_union_type")
_SHARED = re.compile(r"\(DW_OP_const[48]u: (\d+); DW_OP_(?:GNU_push_tls|form_tls)_address")
_DEVICE = re.compile(r"\(DW_OP_addr: ([0-9a-f]+)\)")


@dataclass
class _Entry:
    """One entry of the debug information, and the entries inside it."""

    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    children: list[_Entry] = field(default_factory=list)

    @property
    def name(self) -> str:
        return _INDIRECT.sub("", self.attributes.get("DW_AT_name", "")).strip()

    def number(self, attribute: str) -> int | None:
        text = self.attributes.get(attribute, "").split()
        try:
            return int(text[0], 0)
        except (IndexError, ValueError):
            return None


@dataclass(frozen=True)
class Variable:
    """A variable at a fixed address: its first byte and its type."""

    name: str
    start: int
    type: _Entry
    qualifier: str


class Names:
    """Variables in shared and global memory, and the parameters of functions."""

    def __init__(self, library: Path) -> None:
        self._entries: dict[str, _Entry] = {}
        self._shared: list[Variable] = []
        self._device: list[Variable] = []
        self._functions: dict[str, list[str]] = {}
        tool = shutil.which("readelf")
        if tool is None:
            return
        command = [tool, "--debug-dump=info", str(library)]
        output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        self._read(output)

    def shared(self, offset: int) -> str:
        """The element of a `__shared__` variable at an offset in static shared memory, or ""."""
        return self._describe(self._shared, offset)

    def device(self, offset: int) -> str:
        """The element of a `__device__` variable at an offset in the library, or ""."""
        return self._describe(self._device, offset)

    def parameter(self, function: str, index: int) -> str:
        """The name of a function's parameter, or ""."""
        names = self._functions.get(function, [])
        return names[index] if index < len(names) else ""

    def _read(self, text: str) -> None:
        parents: list[_Entry] = []
        entry: _Entry | None = None
        for line in text.splitlines():
            if match := _ENTRY.match(line):
                depth, place, tag = int(match[1]), match[2], match[3]
                entry = self._entries[place] = _Entry(tag)
                del parents[depth:]
                if parents:
                    parents[-1].children.append(entry)
                parents.append(entry)
            elif entry is not None and (match := _ATTRIBUTE.match(line)):
                entry.attributes[match[1]] = match[2]
        for each in self._entries.values():
            if each.tag == "DW_TAG_variable":
                self._add_variable(each)
            elif each.tag == "DW_TAG_subprogram" and each.name:
                parameters = [
                    child.name for child in each.children if child.tag == "DW_TAG_formal_parameter"
                ]
                self._functions.setdefault(each.name, parameters)

    def _add_variable(self, entry: _Entry) -> None:
        location = entry.attributes.get("DW_AT_location", "")
        declared = self._referred(entry, "DW_AT_specification") or entry
        kind = self._referred(declared, "DW_AT_type")
        if kind is None:
            return
        if match := _SHARED.search(location):
            where = Variable(declared.name, int(match[1]), kind, "__shared__")
            self._shared.append(where)
        elif match := _DEVICE.search(location):
            where = Variable(declared.name, int(match[1], 16), kind, "__device__")
            self._device.append(where)

    def _referred(self, entry: _Entry, attribute: str) -> _Entry | None:
        match = re.match(r"<0x([0-9a-f]+)>", entry.attributes.get(attribute, ""))
        return self._entries.get(match[1]) if match else None

    def _plain(self, entry: _Entry | None) -> _Entry | None:
        """The type without typedefs and qualifiers."""
        tags = ("DW_TAG_typedef", "DW_TAG_const_type", "DW_TAG_volatile_type")
        while entry is not None and entry.tag in tags:
            entry = self._referred(entry, "DW_AT_type")
        return entry

    def _bytes(self, entry: _Entry | None) -> int:
        entry = self._plain(entry)
        if entry is None:
            return 0
        if entry.tag != "DW_TAG_array_type":
            return entry.number("DW_AT_byte_size") or 0
        count = 1
        for extent in self._extents(entry):
            count *= extent
        return count * self._bytes(self._referred(entry, "DW_AT_type"))

    def _extents(self, entry: _Entry) -> list[int]:
        ranges = [child for child in entry.children if child.tag == "DW_TAG_subrange_type"]
        counts = [child.number("DW_AT_count") for child in ranges]  # Clang's; GCC has upper bounds
        return [
            (child.number("DW_AT_upper_bound") or 0) + 1 if count is None else count
            for child, count in zip(ranges, counts, strict=True)
        ]

    def _type_name(self, entry: _Entry | None) -> tuple[str, str]:
        """The parts of a declaration before and after the name."""
        if entry is None:
            return "void", ""
        inner = self._referred(entry, "DW_AT_type")
        if entry.tag == "DW_TAG_array_type":
            before, after = self._type_name(inner)
            return before, "".join(f"[{extent}]" for extent in self._extents(entry)) + after
        if entry.name:
            return entry.name, ""
        before, after = self._type_name(inner)
        if entry.tag == "DW_TAG_pointer_type":
            before += "*"
        if entry.tag in ("DW_TAG_const_type", "DW_TAG_volatile_type"):
            before = f"{'const' if 'const' in entry.tag else 'volatile'} {before}"
        return before, after

    def _describe(self, variables: list[Variable], offset: int) -> str:
        before = [variable for variable in variables if variable.start <= offset]
        if not before:
            return ""
        variable = max(before, key=lambda each: each.start)
        inside, size = offset - variable.start, self._bytes(variable.type)
        type_before, type_after = self._type_name(variable.type)
        declaration = f"`{variable.qualifier} {type_before} {variable.name}{type_after}`"
        if inside >= size:
            return f"{inside - size} bytes past the end of {declaration}"
        element = variable.name + self._element(variable.type, inside)
        return declaration if element == variable.name else f"`{element}` of {declaration}"

    def _element(self, entry: _Entry | None, offset: int) -> str:
        """The indices and members that select a byte of a value of this type."""
        entry = self._plain(entry)
        if entry is None:
            return ""
        if entry.tag == "DW_TAG_array_type":
            inner = self._referred(entry, "DW_AT_type")
            number, rest = divmod(offset, max(1, self._bytes(inner)))
            indices: list[int] = []
            for extent in reversed(self._extents(entry)):
                number, index = divmod(number, extent)
                indices.insert(0, index)
            return "".join(f"[{index}]" for index in indices) + self._element(inner, rest)
        if entry.tag in _STRUCTURES:
            for child in entry.children:
                start = child.number("DW_AT_data_member_location") or 0
                kind = self._referred(child, "DW_AT_type")
                inside = 0 <= offset - start < self._bytes(kind)
                if child.tag == "DW_TAG_member" and child.name and inside:
                    return f".{child.name}{self._element(kind, offset - start)}"
        return ""
