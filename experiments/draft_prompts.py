"""What EXP-020 asks: for answers that quote their context, and for answers that do not. Texts only; no MLX."""

from typing import Final

_CODE: Final = """def shortest_path(graph, start, goal):
    queue, seen = [(0.0, start)], set()
    while queue:
        cost, node = heapq.heappop(queue)
        if node == goal:
            return cost
        if node in seen:
            continue
        seen.add(node)
        for other, weight in graph[node].items():
            heapq.heappush(queue, (cost + weight, other))
    return float("inf")
"""
_JSON: Final = (
    '{"id": 7, "name": "harbour", "depth_m": [12.5, 7.0, 3.25], "open": true, "tags": ["north", "ferry"], '
    '"owner": {"name": "Anna Berg", "email": "anna@example.org", "phone": "555-0134"}, '
    '"berths": [{"number": 1, "length_m": 40}, {"number": 2, "length_m": 25}]}'
)
_STORY: Final = (
    "In a village between two rivers there lived an old clockmaker who mended everything that people brought to him: "
    "clocks and kettles, lamps, umbrellas, and once a church bell. He never asked for money before the work was done, "
    "and he never kept anything longer than a week. When the bridge was washed away in spring, the people on the other "
    "side sent their clocks over by boat."
)
_MAIL: Final = (
    "Hello team,\nthe meeting about the new warehouse in Bremen is on Thursday, 14 March, at 10:30 in room 4.12. "
    "Please bring the figures of February. Julia Winter will join by phone (+49 421 555 0199). The order number is "
    "WH-2291-B.\nRegards, Tom"
)

QUOTING: Final = (
    f"Repeat the following code exactly, without any change:\n```python\n{_CODE}```",
    f'Print this JSON again, with "open" changed to false and nothing else changed:\n{_JSON}',
    "Correct the spelling of this text and print all of it:\n"
    + _STORY.replace("everything", "everthing").replace("bridge", "brigde"),
    f"Rewrite this e-mail with the date changed to 21 March, everything else as it is:\n{_MAIL}",
)

OTHER: Final = (
    "Write a short story about a dog who finds a lighthouse.",
    "Explain how a bicycle stays upright.",
    "Write a Python function that returns the n-th Fibonacci number and explain it.",
    "Write a polite e-mail to my landlord about a broken heater.",
)
