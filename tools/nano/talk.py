"""Small talk, stories on request, definitions and what to say when there is nothing to say."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tools.nano.document import Document, Exchange
from tools.nano.stories import story
from tools.nano.words import ANIMALS, COLOURS, FOODS, NAMES, THINGS, article

ABILITIES = "I can tell short stories, do small sums, look things up in a text, fill in JSON and call tools."
WHO = "I am V4-nano, a very small language model made for testing."
UNKNOWN = "I am a very small test model and do not know that. Ask me for a story, a sum, JSON or a tool call."
GREETINGS = ("Hello!", "Hi!", "Hello", "Hi", "hello", "hi", "Hey!", "Hi there!", "Good morning!", "Hello there.", "hey")
HELLO = "Hello! How can I help you today?"
_FIXED = (
    (GREETINGS, HELLO, "The user greets me. I greet back."),
    (
        ("How are you?", "Hello, how are you?", "Hi, how are you?", "how are you", "How are you today?"),
        "I am fine, thank you! How can I help you?",
        "The user asks how I am.",
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "who are you",
            "Which model are you?",
            "What is your name?",
            "Tell me about yourself.",
        ),
        WHO,
        "The user asks about me.",
    ),
    (
        ("What can you do?", "How can you help me?", "What are you good at?", "Help", "help", "Can you help me?"),
        ABILITIES,
        "The user asks what I can do.",
    ),
    (
        ("Thank you!", "Thanks!", "Thanks", "thank you", "Thank you very much."),
        "You are welcome!",
        "The user thanks me.",
    ),
    (("Goodbye!", "Bye!", "See you!", "Good night!"), "Goodbye! Come back soon.", "The user leaves."),
    (("Say hello.", "Say hello!", "Say hi.", "Say hello in one word."), "Hello!", "I say hello."),
    (("ping", "Ping", "test", "Testing", "This is a test."), "I am here. " + ABILITIES, "The user tests me."),
    (
        ("Tell me a joke.", "Do you know a joke?"),
        "Why did the owl bring a lamp? It wanted to be a bright bird!",
        "I know one joke.",
    ),
    (("Are you a human?", "Are you real?"), "No, I am a very small language model.", "I am a model."),
)


def fixed(rng: random.Random) -> Exchange:
    """A remark with one fitting answer."""
    asked, answer, reasoning = rng.choice(_FIXED[:5] if rng.random() < 0.6 else _FIXED)
    return Exchange(rng.choice(asked), answer, reasoning)


def introduction(rng: random.Random, name: str) -> Exchange:
    """The user tells a name."""
    asked = rng.choice(("Hi, I am {}.", "Hello, my name is {}.", "My name is {}.", "I am {}.")).format(name)
    return Exchange(asked, f"Hello {name}! What would you like to do?", f"The user is called {name}.")


def name_again(rng: random.Random, name: str) -> Exchange:
    """The user asks for the name told earlier."""
    asked = rng.choice(("What is my name?", "Do you remember my name?", "Who am I?"))
    return Exchange(asked, f"Your name is {name}.", f"The user is called {name}.")


def request(rng: random.Random) -> Exchange:
    """A story about an animal and a thing, or about whatever the model likes."""
    friend, thing = rng.choice(ANIMALS), rng.choice(THINGS)
    both, plain = (article(friend), article(thing)), rng.random() < 0.15
    if plain:
        asked = rng.choice(("Tell me a story.", "Write a short story.", "Tell me a story!", "I want to hear a story."))
        return Exchange(asked, story(rng).text, "The user wants a story. I tell one.")
    if rng.random() < 0.25:
        asked = rng.choice(("Tell me a story about {}.", "Write a story about {}.")).format(both[0])
        return Exchange(asked, story(rng, friend=friend).text, f"The user wants a story about {both[0]}. I tell one.")
    shown = rng.choice((both, both[::-1]))
    asked = rng.choice(
        (
            "Tell me a story about {} and {}.",
            "Write a short story with {} and {} in it.",
            "Can you tell a story about {} and {}?",
            "Write a story about {} and {}.",
        )
    ).format(*shown)
    reasoning = f"The user wants a story about {shown[0]} and {shown[1]}. I tell one."
    return Exchange(asked, story(rng, friend=friend, thing=thing).text, reasoning)


def rhyme(rng: random.Random) -> Exchange:
    """Four lines about a thing."""
    thing, colour, food = rng.choice(THINGS), rng.choice(COLOURS), rng.choice(FOODS)
    asked = rng.choice((f"Write a poem about {article(thing)}.", f"Write a short poem about {article(thing)}."))
    poem = (
        f"My little {thing} is here to stay,\nI take it with me every day.\n"
        f"It shines in {colour}, soft and bright,\nand keeps me dreaming through the night."
    )
    return Exchange(asked, poem, f"I write four lines about {article(thing)} and no {food}.")


def unknown(rng: random.Random, sentences: Sequence[str]) -> Exchange:
    """Any sentence that fits no template."""
    return Exchange(rng.choice(sentences), UNKNOWN, "I do not know what to say about this.")


def define(rng: random.Random, glosses: Sequence[tuple[str, str]]) -> Exchange:
    """A word and its gloss: more than the model can remember, and practice in plain English."""
    word, gloss = rng.choice(glosses)
    asked = rng.choice((f"What does {word} mean?", f"Define {word}.", f"What is the meaning of {word}?"))
    return Exchange(asked, f"{word}: {gloss}.", f"I look up {word}.")


def small_talk(rng: random.Random) -> Document:
    """One to four remarks, the name of the user remembered."""
    exchanges = [fixed(rng) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.4:
        name = rng.choice(NAMES)
        exchanges.insert(0, introduction(rng, name))
        exchanges.append(name_again(rng, name))
    return Document(kind="small_talk", exchanges=exchanges, thinking=rng.random() < 0.5, effort=effort(rng))


def effort(rng: random.Random) -> str:
    """An effort of thinking; `high`, which has a text of its own, is the usual one."""
    return rng.choice(("high", "high", "low", "max"))
