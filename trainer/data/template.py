"""Chat templates: Jinja as the transformers library uses it, run in a sandbox, because it comes with a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from ckptstore.errors import MalformedError, RefusedError

TEMPLATE = "chat_template.jinja"

ROLES = ("user", "assistant")

Render = Callable[[Sequence[str]], str]


def compile_template(template: bytes, variables: Mapping[str, object]) -> Render:
    """A function from alternating turns, the user first, to the text that the template makes of them.

    After a turn of the user the beginning of an answer is asked for (``add_generation_prompt``), after an answer not,
    so that a longer conversation continues what was rendered of its beginning.

    Args:
        template: UTF-8.
        variables: what it may use beside the messages, such as ``bos_token``.

    Raises:
        MalformedError: it does not compile. The function raises RefusedError for whatever goes wrong while it runs.
    """
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    class Environment(ImmutableSandboxedEnvironment):
        """Without arithmetic that makes much of little: a template joins texts."""

        intercepted_binops = frozenset({"*", "**", "%"})

        def call_binop(self, context: object, operator: str, left: Any, right: Any) -> Any:
            if operator == "%" and type(left) is int and type(right) is int and right:
                return left % right
            raise TemplateError(f"a template cannot use {operator}")

    environment = Environment(trim_blocks=True, lstrip_blocks=True, autoescape=False)
    environment.globals["raise_exception"] = refuse
    try:
        compiled = environment.from_string(template.decode())
    except Exception as error:  # a template is compiled as a program, and can be wrong in all the ways of one
        raise MalformedError(TEMPLATE, f"{type(error).__name__}: {error!s:.300}") from None

    def render(turns: Sequence[str]) -> str:
        messages = [{"role": ROLES[i % 2], "content": turn} for i, turn in enumerate(turns)]
        try:
            text = compiled.render(messages=messages, add_generation_prompt=len(turns) % 2 == 1, **variables)
            text.encode()
            return text
        except Exception as error:  # as above, while it runs
            raise RefusedError(TEMPLATE, f"{type(error).__name__}: {error!s:.300}") from None

    return render
