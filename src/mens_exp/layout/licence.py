"""Licence terms of published weights for whoever passes them on.

Only licences whose terms are plain are here, each with its clause; of any other the answer is
unknown. It is no legal advice, and no reading of what else a licence asks.
"""

from __future__ import annotations

__all__ = ["attribution_required"]

# Ids as the hub writes them. Those that ask for a notice of origin: Apache-2.0 section 4, the
# copyright line of MIT and BSD, section 3(a) of CC BY 4.0, the notice file of each Llama licence
# (section 1.b, since Llama 3 with "Built with Llama"), that of the Gemma terms (section 3.1).
_ASK = frozenset(
    {
        *("apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause"),
        *("cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0"),
        *("llama2", "llama3", "llama3.1", "llama3.2", "llama3.3", "gemma"),
    }
)
_ASK_NOTHING = frozenset({"cc0-1.0", "unlicense", "mit-0", "0bsd"})


def attribution_required(licence: str | None) -> bool | None:
    """Tell whether a licence asks for a notice of where the weights come from.

    Args:
        licence: as the publisher names it, SPDX or the hub's own id; capitals mean nothing.

    Returns:
        None where the licence, or what it asks, is unknown.
    """
    name = (licence or "").lower()
    if name in _ASK:
        return True
    return False if name in _ASK_NOTHING else None
