"""The prompts of the pipeline: one file per purpose and language beside this module.

They are filled with `compeer_core.prompts.fill`; texts of people and models pass through
`compeer_core.prompts.neutralise` first.
"""

from functools import cache
from pathlib import Path

from compeer_core.errors import PromptError

_FOLDER = Path(__file__).parent


@cache
def load(name: str, language: str = "en") -> str:
    """Return the text of a prompt, stripped.

    Args:
        name: The purpose, for example ``filter``.
        language: ISO 639-1, for example ``zh``.

    Raises:
        PromptError: There is no such file.
    """
    path = _FOLDER / f"{name}.{language}.md"
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        known = ", ".join(sorted(file.stem for file in _FOLDER.glob("*.md")))
        raise PromptError(
            f"no prompt {name!r} in language {language!r}; known: {known or 'none'}"
        ) from error
