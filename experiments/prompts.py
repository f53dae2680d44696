"""The prompts of EXP-003 and EXP-004: the seed documents' own and twenty others. Owns texts and their lengths; no MLX.

Texts beyond their first sentences go on with their own words in a shuffled order (seeded): text that repeats itself is
continued by copying, and two wrong caches would then agree by chance.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

SEED_PROMPTS: Final = (
    "The quick brown fox jumps over the lazy",
    "The quick brown fox",
    "The capital of France is",
    "Machine learning is",
    "Python programming language",
    "Hello world",
    "Once upon a time",
)
"""As the seed documents give them: EXP-003's report and plan first, then EXP-004's."""

_TEXTS: Final = {
    "English": "In a village between two rivers there lived an old clockmaker who mended everything that people brought "
    "to him: clocks and kettles, lamps, umbrellas, and once the heart of a wooden soldier. When the bridge fell in the "
    "spring flood, nobody could reach the market any more, so he asked the miller's daughter to draw the river as it had "
    "been before the water came, with every stone, and then he began to count. ",
    "German": "Am Morgen nach dem Sturm lagen Äste, Ziegel und ein halbes Boot auf der Straße, und die Bäckerin öffnete "
    "trotzdem um sechs Uhr ihren Laden. Wer Brot kaufen wollte, musste über den Baumstamm klettern, den niemand "
    "wegräumen konnte, weil die Feuerwehr noch am Deich stand und Säcke füllte. ",
    "French": "Le phare n'avait plus de gardien depuis longtemps, pourtant la lumière tournait encore chaque nuit au-dessus "
    "des rochers. Les pêcheurs disaient qu'une machine s'en occupait, mais l'institutrice, qui habitait en face, voyait "
    "parfois une ombre monter l'escalier. ",
    "Spanish": "El mercado abría antes del amanecer y los primeros clientes llegaban con linternas para elegir el pescado. "
    "Mi abuela conocía a cada vendedor por su nombre, preguntaba por los hijos, discutía el precio y siempre añadía un "
    "limón o un manojo de perejil. ",
    "Portuguese": "A estação ficava no alto da serra e o comboio só parava quando alguém fazia sinal com um lenço branco. "
    "Naquela manhã de nevoeiro ninguém viu o sinal, e por isso a viagem do carteiro começou a pé. ",
    "Russian": "Поезд остановился посреди степи, и пассажиры вышли посмотреть на звёзды. Никто не знал, сколько придётся "
    "ждать, поэтому проводница поставила самовар, а старый учитель начал рассказывать о городе своего детства. ",
    "Japanese": "駅前の小さな本屋は、雨の日だけ夜遅くまで開いている。店主は客に本を売るよりも、古い地図の話をするのが好きだった。",
    "Chinese": "山脚下的小镇每年秋天都会举行灯会。孩子们提前一个月开始做灯笼，老人们则坐在桥边讲述从前的故事。",
    "Arabic": "كان البحر هادئا في ذلك الصباح، وخرج الصيادون قبل شروق الشمس بحثا عن السمك الذي اختفى منذ أسابيع طويلة. ",
    "Hindi": "गाँव के पुराने कुएँ के पास एक पेड़ था जिसकी छाया में सब लोग दोपहर को बैठकर बातें करते थे। ",
    "emoji": "🚀🌍 ok 👩‍👩‍👧 → 🙂 ",
    "digits": "3.14159 26535 89793 = 2^10 - 17 * 41; 1, 1, 2, 3, 5, 8, 13, 21, ",
    "Python": "import heapq\n\n\ndef shortest_path(graph: dict[str, dict[str, float]], start: str, goal: str) -> float:\n"
    "    queue, seen = [(0.0, start)], set()\n    while queue:\n        cost, node = heapq.heappop(queue)\n"
    "        if node == goal:\n            return cost\n        if node in seen:\n            continue\n        seen.add(node)\n"
    "        for other, weight in graph[node].items():\n            heapq.heappush(queue, (cost + weight, other))\n",
    "JSON": '{"id": 7, "name": "harbour", "depth_m": [12.5, 7.0, null], "open": true, "tags": ["north", "ferry"], "ships": {',
}

_OTHERS: Final = (
    *(("English", 5), ("emoji", 7), ("French", 16), ("digits", 31), ("Japanese", 64), ("Chinese", 100)),
    *(("Arabic", 129), ("Russian", 180), ("Python", 243), ("English", 244), ("German", 245), ("English", 255)),
    *(("Python", 256), ("Spanish", 257), ("JSON", 258), ("Hindi", 300), ("Portuguese", 420), ("English", 500)),
    *(("German", 501), ("Python", 600)),
)
"""Twelve generated tokens take 243, 244, 245, 500 and 501 to 255, 256, 257, 512 and 513."""

DELTAS: Final = (
    " And then",
    "\n\nLet us look at it from the other side: what would have happened if nobody had come at all?",
    "。",
    " 1",
    "\n    return None\n\n\ndef test_",
    " Aber warum?",
)
"""What the next turn adds, one after the other; from one token to a sentence."""


@dataclass(frozen=True)
class NamedPrompt:
    """A prompt, and the name of the agent that asks it."""

    name: str
    kind: str
    text: str


def seed_prompts() -> list[NamedPrompt]:
    return [NamedPrompt(f"seed {n}", "seed", text) for n, text in enumerate(SEED_PROMPTS, start=1)]


def other_prompts(encode: Callable[[str], list[int]]) -> list[NamedPrompt]:
    """Twenty prompts of 5 to 600 tokens, as `encode` counts them."""
    return [NamedPrompt(f"{kind} {n}", kind, text_of(encode, kind, n)) for kind, n in _OTHERS]


def text_of(encode: Callable[[str], list[int]], kind: str, n_tokens: int) -> str:
    """The longest beginning of a text that has at most `n_tokens` tokens; exact where a character is one token or less."""
    base = _TEXTS[kind]
    text, shuffled = base, random.Random(n_tokens)
    pieces = base.split(" ") if " " in base else list(base)
    while len(encode(text)) <= n_tokens:
        shuffled.shuffle(pieces)
        text += (" " if " " in base else "").join(pieces)
    low, high = 1, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(encode(text[:middle])) <= n_tokens else (low, middle - 1)
    return text[:low]
