"""A page of HTML as a reader of it sees it: its tags and its text."""

from html.parser import HTMLParser

VOID = {"meta", "br"}


class Page(HTMLParser):
    """The tags of a page in order, its text, and whether every tag is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.pre = self.marked = self.title = ""  # what stands in these elements
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        self.text += " " if tag in ("br", "td", "th") else ""

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.text += "" if self.open[-1:] == ["style"] else data
        if "pre" in self.open:
            self.pre += data
            self.marked += data if "mark" in self.open else ""
        self.title += data if "title" in self.open else ""

    @property
    def words(self) -> str:
        return " ".join(self.text.split())
