"""The stand-in for a model in the self-test of suite=lm_eval."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Known"]

_FAR: Final = -100.0  # nats; what is said of a wrong text


class Known:
    """A stand-in for a model in tests: it knows every target, and says it or the contrary."""

    rank, world_size = 0, 1
    tokenizer_name = "none"

    def __init__(self, tasks: dict[str, Any], *, is_right: bool) -> None:
        """Take the harness's tasks by name, and what to say of them."""
        self.tasks, self.is_right = tasks, is_right

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Join the turns."""
        del add_generation_prompt
        return "\n".join(turn["content"] for turn in chat_history)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Answer with the target, or with nothing."""
        return [self._target(one) if self.is_right else "" for one in requests]

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Tell how likely each text is, in nats, and whether it is the likeliest."""
        said = [self._is_target(one) == self.is_right for one in requests]
        return [(0.0, True) if one else (_FAR, False) for one in said]

    def _target(self, request: Any) -> str:
        task = self.tasks[request.task_name]
        target = task.doc_to_target(request.doc)
        if task.config.doc_to_choice is not None and isinstance(target, int):
            return str(task.doc_to_choice(request.doc)[target])
        return str(target[0] if isinstance(target, list) else target)

    def _is_target(self, request: Any) -> bool:
        task = self.tasks[request.task_name]
        if task.OUTPUT_TYPE != "multiple_choice":
            return True
        gold = (task.doc_to_text if task.multiple_input else task.doc_to_target)(request.doc)
        choices = task.doc_to_choice(request.doc)
        place = request.idx % len(choices)  # beyond them stand the same without a context
        return any(
            one in {place, choices[place]} for one in (gold if isinstance(gold, list) else [gold])
        )
