"""A split as one HTML page that needs nothing else: its numbers, its texts, and a script."""

import json
import re
from dataclasses import asdict
from html import escape
from importlib.resources import files
from typing import Any

from tp.picture.text import parts_of
from tp.roll import roll
from tp.split_json import weighed_json
from tp.stages import Asked
from tp.weighing import Weighed

SCRIPTS = ("text.js", "matrices.js", "charts.js", "layers.js", "page.js")


def page(weighed: Weighed) -> str:
    """The page of a split."""
    chips = f"{weighed.chips} chip{'s' if weighed.chips > 1 else ''}"
    told = {
        "title": escape(f"{weighed.outline.name} on {chips}"),
        "style": _file("page.css"),
        "data": _in_script(page_data(weighed)),
        "script": '"use strict";\n' + "\n".join(map(_file, SCRIPTS)),
    }
    # In one pass, so that what is put in is not looked at again.
    return re.sub(r"\{\{(\w+)\}\}", lambda hole: told[hole[1]], _file("page.html"))


def page_data(weighed: Weighed) -> dict[str, Any]:
    """What a page is drawn from: `facts` as `--json` has them, and `parts` of the text."""
    asked = Asked(outline=weighed.outline, chips=weighed.chips, context=weighed.context)
    parts = parts_of(roll(asked.joint), weighed.chips)
    return {"facts": weighed_json(weighed), "parts": [asdict(part) for part in parts]}


def _in_script(data: Any) -> str:
    """JSON that no browser takes for the end of its script, or for a comment."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _file(name: str) -> str:
    return files("tp.picture").joinpath(name).read_text(encoding="utf-8")
