"""The table that the sweep prints: Markdown, one row a place, one column a state, in it the hits of each death."""

from collections import Counter

from tests.sweep.places import ALL, DEATHS, IMPOSSIBLE, STATES


def render(hits: Counter[tuple[str, str, str, str]]) -> str:
    """`hits` by sweep, place, death and state."""
    lines = []
    for sweep in dict.fromkeys(key[0] for key in sorted(hits)):
        ours = {key[1:]: count for key, count in hits.items() if key[0] == sweep}
        lines += [f"### {sweep}", "", *_table(ours), ""]
    lines.append(f"{hits.total()} hits in {len(hits)} cells. Not to be hit:")
    lines += ["", *(f"- `{place}` when {state}: {why}" for (place, state), why in IMPOSSIBLE.items())]
    return "\n".join(lines) + "\n"


def _table(hits: dict[tuple[str, str, str], int]) -> list[str]:
    places = _in_order({key[0] for key in hits}, ALL)
    deaths = _in_order({key[1] for key in hits}, tuple(DEATHS))
    states = _in_order({key[2] for key in hits}, STATES)
    lines = [f"| hits by {', '.join(deaths)} | {' | '.join(states)} |", "|" + " --- |" * (len(states) + 1)]
    for place in places:
        cells = (" ".join(str(hits.get((place, death, state), 0)) for death in deaths) for state in states)
        lines.append(f"| `{place}` | {' | '.join(cells)} |")
    return lines


def _in_order(found: set[str], known: tuple[str, ...]) -> list[str]:
    return [*(name for name in known if name in found), *sorted(found - set(known))]
