"""A griffe extension: `Example:` in a docstring is a section of code, as `Examples:` is."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the section before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section in the docstring of `obj`."""
        if obj.docstring is not None:
            renamed = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = renamed
