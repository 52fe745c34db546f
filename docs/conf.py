"""Settings of Sphinx for the docs site. `make docs` builds it with every warning as an error."""

import re
from pathlib import Path

HERE = Path(__file__).parent

project = "seedbed"
html_title = "seedbed"
extensions = ["myst_nb"]  # Markdown pages, and notebooks with the outputs that they are committed with
nb_execution_mode = "off"
myst_heading_anchors = 4  # pages link to each other as on a code host: by file, and by the anchors of headings
nitpicky = True
smartquotes = False  # two dashes are an option, not a dash
highlight_language = "text"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False


def link_outside_pages(app, name: str, source: list[str]) -> None:
    """Links to files outside docs/ become copies of these files. Sphinx does so itself, but for other Markdown files."""

    def link(match: re.Match[str]) -> str:
        is_page = (HERE / name).parent.joinpath(match[2]).resolve().is_relative_to(HERE)
        return match[0] if is_page else f"{{download}}`{match[1]} <{match[2]}>`"

    source[0] = re.sub(r"\[([^]`]+)\]\((\.\./[^)#\s]+\.md)\)", link, source[0])


def setup(app) -> None:
    app.connect("source-read", link_outside_pages)
