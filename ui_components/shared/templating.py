"""HTML templates. Jinja escapes every value.

The parts of the page are `gradio.HTML` components that show this HTML unchanged. Gradio's own
templates are not used: after filling in ``{{value}}`` they evaluate the result as a JavaScript
template string, so a message with ``${...}`` in it would run as code in the browser.
"""

from functools import cache
from pathlib import Path

import jinja2

TEMPLATES = Path(__file__).parents[1] / "templates"


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES, encoding="utf-8"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(name: str, **values: object) -> str:
    """Render a template of ``templates/``."""
    return _environment().get_template(name).render(values).strip()
