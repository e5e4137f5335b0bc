"""HTML from nested calls. Text is escaped unless it is `Html` already, so no name can be markup."""

import html
from collections.abc import Iterable

Attribute = str | int | float | bool | None
_VOID = ("meta", "input")


class Html(str):
    """Text that is HTML: built by this module, or by whoever vouches for it."""

    __slots__ = ()


def element(name: str, /, *children: str, **attributes: Attribute) -> Html:
    """One element. `class_="a"` becomes class, `data_row=1` data-row; None and False vanish."""
    opened = "".join([f"<{name}", *map(_attribute, attributes.items()), ">"])
    if name in _VOID:
        return Html(opened)
    return Html(f"{opened}{join(children)}</{name}>")


def join(parts: Iterable[str]) -> Html:
    """The parts one after the other, each escaped unless it is `Html`."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def escape(text: str) -> Html:
    """The text with every character that means something in HTML made harmless."""
    # A name read from JSON may hold half a surrogate pair, which no file can be written with.
    return Html(html.escape(text.encode("utf-8", "replace").decode()))


def paragraph(*children: str, **attributes: Attribute) -> Html:
    """A paragraph."""
    return element("p", *children, **attributes)


def table(headers: Iterable[str], rows: Iterable[Iterable[str]], right: Iterable[int] = ()) -> Html:
    """A table that scrolls sideways by itself; the columns in `right` hold numbers."""
    numeric = set(right)

    def line(kind: str, cells: Iterable[str]) -> Html:
        made = (
            element(kind, cell, class_="number" if index in numeric else None)
            for index, cell in enumerate(cells)
        )
        return element("tr", *made)

    head = element("thead", line("th", headers))
    body = element("tbody", *(line("td", cells) for cells in rows))
    return element("div", element("table", head, body), class_="scroll", tabindex=0)


def _attribute(item: tuple[str, Attribute]) -> str:
    name, value = item[0].rstrip("_").replace("_", "-"), item[1]
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'
