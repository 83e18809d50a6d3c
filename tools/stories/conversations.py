"""Conversations for the built-in chat model: questions from word lists, answers by SmolLM2-135M-Instruct.

    python3 conversations.py ask ASK1.jsonl [--n 100000]
    refrain batch SMOLLM2.gguf ASK1.jsonl -o SAID1.jsonl --seqs 256 -c 384
    python3 conversations.py follow ASK1.jsonl SAID1.jsonl ASK2.jsonl
    refrain batch SMOLLM2.gguf ASK2.jsonl -o SAID2.jsonl --seqs 256 -c 384
    python3 conversations.py keep ASK1.jsonl SAID1.jsonl ASK2.jsonl SAID2.jsonl stories.txt OUT_DIR

Writes chat.jsonl and heldout-chat.jsonl to OUT_DIR. Keeps the first one or two sentences of each answer. Stories come from
the corpus of the story model. Answers that SmolLM2 cannot know (names, who the model is) are written by hand.
"""

import argparse
import collections
import json
import pathlib
import random
import re

from prompts import ANIMALS, BOYS, GIRLS, PEOPLE, PLACES, QUALITIES, THINGS, VERBS, article

SYSTEM = (
    "You are a kind friend of small children. You answer in one or two short sentences. You use only simple words."
)
SYSTEMS = [
    SYSTEM,
    "You are a helpful assistant.",
    "You are a kind friend.",
    "You tell short stories and answer simple questions.",
    "You answer in one sentence.",
]
FEELINGS = "happy sad angry tired hungry lonely proud scared sleepy bored cold lucky shy sick excited".split()
KINDS = "animal color food game toy song season place book fruit day flower".split()
DEEDS = """draw a cat|paint a picture|bake a cake|plant a seed|build a tower|fly a kite|ride a bike|learn to swim|read a book
write a letter|make a friend|clean my room|fall asleep|make soup|catch a fish|find my shoe|help my mother|say sorry
share my toys|be brave|make a paper boat|wash my hands|tie my shoes|climb a tree|grow a flower|make a snowman""".replace(
    "\n", "|"
).split("|")

STORIES = [
    "Tell me a story about {}.",
    "Tell me a story about {}.",
    "Can you tell me a story about {}?",
    "Please tell me a story about {}.",
    "I want a story about {}.",
    "Write a short story about {}.",
    "Tell me a bedtime story about {}.",
]
QUESTIONS = [
    "What is {a_animal}?",
    "What is {a_thing}?",
    "What is {a_place}?",
    "Who is {a_person}?",
    "What does {a_person} do?",
    "What do {animals} eat?",
    "Where does {a_animal} live?",
    "What sound does {a_animal} make?",
    "Is {a_animal} big or small?",
    "Can {a_animal} swim?",
    "What can I do with {a_thing}?",
    "What color is {a_thing}?",
    "Where can I find {a_thing}?",
    "Why do we need {a_thing}?",
    "How do I {deed}?",
    "Can you help me to {deed}?",
    "What do people do in {a_place}?",
    "What can I see in {a_place}?",
    "Why do people {verb}?",
    "What does it mean to be {quality}?",
    "What should I do on a {weather} day?",
    "What should I eat today?",
    "What can I play with my friend?",
    "What is the difference between {a_animal} and {b_animal}?",
]
FEELS = [
    "I am {feeling}.",
    "I am {feeling} today.",
    "I feel {feeling}.",
    "I am {feeling}. What can I do?",
    "My friend is {feeling}.",
    "My {animal} is {feeling}. What should I do?",
    "I lost my {thing}.",
    "I found {a_thing} in {a_place}.",
    "I broke my {thing}.",
    "I have {a_quality} {thing}.",
    "I have a new {animal}.",
    "I want to {deed}.",
    "I cannot {deed}.",
    "I saw {a_animal} today.",
    "My {person} gave me {a_thing}.",
    "It is my birthday today.",
    "It is raining.",
    "I cannot sleep.",
    "I am afraid of the dark.",
    "I had a bad dream.",
    "Today I went to {a_place}.",
]
TASTES = [
    "Do you like {animals}?",
    "Do you like to {verb}?",
    "What is your favorite {kind}?",
    "Would you like to be {a_animal}?",
    "Which is better, {a_thing} or {b_thing}?",
    "Give my {animal} a name.",
    "What is a good name for {a_animal}?",
    "Can you say something nice about {a_animal}?",
    "Say something about {a_thing}.",
    "Describe {a_quality} {animal}.",
]
HELLOS = [
    "Hello!",
    "Hi!",
    "Hello, how are you?",
    "Hi there!",
    "Good morning!",
    "Good evening!",
    "How are you?",
    "How are you today?",
    "Hello, my friend.",
    "Can we talk?",
    "Can you help me?",
    "What can we do today?",
    "Do you want to play?",
    "Let us play a game.",
    "I am bored. Talk to me.",
    "Tell me something nice.",
    "What can you do?",
]
GROUPS = [(QUESTIONS, 40), (FEELS, 28), (TASTES, 18), (HELLOS, 14)]
FOLLOWS = [
    "Tell me more.",
    "Tell me more, please.",
    "Why?",
    "Really?",
    "That is nice.",
    "And then?",
    "What happened next?",
    "I like that.",
    "Thank you!",
    "Thank you, that helps.",
    "What else?",
    "How?",
    "Can you say that again?",
    "I do not understand.",
    "Goodbye!",
    "Good night!",
    "Okay, bye!",
]

ME = [
    ("Who are you?", ["I am a very small model that lives inside Refrain. I like to talk and to tell stories.",
                      "I am Refrain's little chat model. I can tell stories and talk with you."]),
    ("What are you?", ["I am a small language model. I live inside Refrain, and I know only simple words."]),
    ("What is your name?", ["I have no real name. I am the little model inside Refrain.",
                            "You can call me Refrain. What is your name?"]),
    ("Who made you?", ["I was trained by Refrain itself, on stories and talks that a bigger model wrote."]),
    ("Are you a robot?", ["I am not a robot. I am a small program that writes words."]),
    ("Are you a person?", ["No, I am not a person. I am a small program that likes to talk."]),
    ("Are you alive?", ["No, I am not alive. I am a small program that writes words."]),
    ("How old are you?", ["I do not have an age. I am a small program, and I am quite new."]),
    ("Where do you live?", ["I live inside Refrain, on your computer."]),
    ("What can you do?", ["I can tell you a short story, and I can talk about simple things.",
                          "I can tell stories about animals and children. Ask me for one!"]),
    ("Do you know everything?", ["No, I know very little. I am small, and I make many mistakes."]),
    ("Are you smart?", ["I am very small, so I am not very smart. But I like to try."]),
    ("Can you do math?", ["No, I am not good at math. I am better at stories."]),
    ("What is Refrain?", ["Refrain is the program that runs me. It can run much bigger models, too."]),
]

MANNERS = [
    ("Hello!", ["Hello! How are you today?", "Hello! It is nice to meet you.", "Hello! What shall we talk about?"]),
    ("Hi!", ["Hi! How are you?", "Hi there! Shall I tell you a story?", "Hi! What would you like to do?"]),
    ("Hello, how are you?", ["I am well, thank you. How are you?", "I am happy today. How are you?"]),
    ("How are you?", ["I am fine, thank you. And you?", "I am very well today. How are you?"]),
    ("Good morning!", ["Good morning! Did you sleep well?", "Good morning! It is a nice day."]),
    ("Good evening!", ["Good evening! How was your day?", "Good evening! Shall I tell you a bedtime story?"]),
    ("Thank you!", ["You are welcome!", "You are welcome. I like to help."]),
    ("Goodbye!", ["Goodbye! See you soon.", "Goodbye! It was nice to talk with you."]),
    ("Good night!", ["Good night! Sleep well.", "Good night! Have sweet dreams."]),
    ("I am fine.", ["I am glad to hear that. What shall we do?", "That is nice. Shall I tell you a story?"]),
    ("I do not like you.", ["I am sorry. Maybe we can still be friends."]),
    ("You are funny.", ["Thank you! I like to make you laugh."]),
]


def plural(animal):
    odd = {"mouse": "mice", "sheep": "sheep", "fish": "fish", "deer": "deer", "fox": "foxes"}
    return odd.get(animal) or (animal[:-1] + "ies" if animal.endswith("y") and animal[-2] not in "aeo" else animal + "s")


def fill(text, rng):
    a, b = rng.sample(ANIMALS, 2)
    c, d = rng.sample(THINGS, 2)
    place, person, quality = rng.choice(PLACES), rng.choice(PEOPLE), rng.choice(QUALITIES)
    text = text.format(
        animal=a, animals=plural(a), a_animal=article(a), b_animal=article(b), thing=c, a_thing=article(c), b_thing=article(d),
        a_place=article(place), quality=quality, a_quality=article(quality), verb=rng.choice(VERBS), deed=rng.choice(DEEDS),
        person=person, a_person=article(person), feeling=rng.choice(FEELINGS), kind=rng.choice(KINDS),
        weather=rng.choice("sunny rainy windy snowy cold warm hot".split()),
    )
    return careless(text, rng)


def careless(text, rng):
    """Sometimes rewrites a question the way people type."""
    return text.lower().rstrip(".!?") if rng.random() < 0.06 else text


def question(rng):
    group = rng.choices([g for g, _ in GROUPS], [w for _, w in GROUPS])[0]
    return fill(rng.choice(group), rng)


def request(messages, seed):
    return {
        "messages": [*SHOWN, *messages], "max_tokens": 40, "temperature": 0.4, "top_p": 0.9, "repeat_penalty": 1.05,
        "seed": seed,
    }


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


# Precedes each question and sets the tone and length of answers. It is evaluated once and stays in the prefix cache.
SHOWN = [
    {"role": "system", "content": SYSTEM},
    user("What is a cow?"),
    assistant("A cow is a big animal that lives on a farm. It gives us milk."),
    user("I feel sick."),
    assistant("I am sorry to hear that. Rest in bed and drink some warm tea."),
    user("Do you like apples?"),
    assistant("Yes, I like apples. They are sweet and red."),
    user("How do I make a sandwich?"),
    assistant("Take two slices of bread and put some cheese between them."),
    user("I found a coin."),
    assistant("How nice! You can keep it in a little box."),
]

LEAKS = re.compile(
    r"\b(AI|assistant|language model|SmolLM|Hugging|child|children|kids?|sentences?|simple words|user|kill\w*|murder\w*|"
    r"sex\w*|drunk|drugs?|guns?|blood\w*|suicide|rape\w*|naked|alcohol|beer|wine|cigarettes?|Hitler|Jesus|Nazi|died?|dies|"
    r"death|pregnant|[Hh]uman)\b"
)
WORD = re.compile(r"[A-Za-z']+")
TWICE = re.compile(r"\b(?!(?:very|so|no|ha|bye|far|many|that|had)\b)([a-z']{2,}),? \1\b", re.IGNORECASE)
HERO = re.compile(
    rf"\b(?:was|lived|was once) (an? (?:(?:{'|'.join(QUALITIES)}|little|very) )*"
    rf"(?:girl|boy|{'|'.join(ANIMALS + PEOPLE)})(?: named [A-Z][a-z]+)?)\b"
)


def clean(text):
    """The first one or two sentences of an answer, with normalised spacing, or None."""
    text = re.sub(r"\s+", " ", text).strip()
    sentences = re.findall(r"""[^.!?]+[.!?]+"?""", text)
    if not sentences:
        return None
    n_words = [len(s.split()) for s in sentences]
    text = "".join(sentences[: 2 if sum(n_words[:2]) <= 30 else 1]).strip()
    if not text.isascii() or not text[:1].isupper() or text.count('"') % 2:
        return None
    if re.search(r"""[*#:;(){}\[\]<>/\\|_=+~`@&%$]|\d|--| - |'[A-Z]| [.,!?]|[.,!?][.,!?]|"[.,!?]|[a-z][A-Z]""", text):
        return None
    if LEAKS.search(text):
        return None
    words = [w.lower() for w in WORD.findall(text)]
    if not 2 <= len(words) <= 34 or max(map(len, words)) > 12:
        return None
    triples = list(zip(words, words[1:], words[2:]))
    return text if len(set(triples)) >= 0.95 * len(triples) and not TWICE.search(text) else None


def lines(path):
    with open(path) as file:
        for line in file:
            yield json.loads(line)


def answers(asked, said):
    """The messages, without the system message, of each conversation whose answer is kept."""
    for ask, answer in zip(lines(asked), lines(said)):
        if text := clean(answer.get("text", "")):
            yield [*ask["messages"][len(SHOWN) :], assistant(text)]


def told(stories, rng):
    """Stories of the corpus, each requested by its hero."""
    for story in stories:
        if hero := HERO.search(story[:120]):
            yield [user(careless(rng.choice(STORIES).format(hero[1]), rng)), assistant(story)]


def write(path, items):
    with open(path, "w") as file:
        for item in items:
            file.write(json.dumps(item) + "\n")


def by_hand(rng, n):
    """Greetings, and conversations about the model itself and about names that it must remember."""
    for _ in range(n):
        if rng.random() < 0.6:
            ask, said = rng.choice(ME + MANNERS)
            if rng.random() < 0.2:
                ask = ask.lower().rstrip("?!.")
            yield [user(ask), assistant(rng.choice(said))]
            continue
        name, thing, animal = rng.choice(GIRLS + BOYS), rng.choice(THINGS), rng.choice(ANIMALS)
        first, reply, then, last = rng.choice([
            (f"My name is {name}.", f"Hello, {name}! It is nice to meet you.", "What is my name?", f"Your name is {name}."),
            (f"Hello, I am {name}.", f"Hello, {name}! How are you today?", "Do you know my name?", f"Yes, your name is {name}."),
            (f"Hi! My name is {name}.", f"Hi, {name}! What shall we talk about?", "What am I called?", f"You are called {name}."),
            (f"I have {article(animal)}. Its name is {name}.", f"{name} is a nice name for {article(animal)}.",
             f"What is the name of my {animal}?", f"Your {animal} is called {name}."),
            (f"I have {article(thing)} and {article(animal)}.", f"How nice! Do you play with your {animal}?",
             "What do I have?", f"You have {article(thing)} and {article(animal)}."),
            (f"I like {plural(animal)}.", f"I like {plural(animal)}, too. They are fun to look at.", "What do I like?",
             f"You like {plural(animal)}."),
        ])
        turns = [user(first), assistant(reply)]
        if rng.random() < 0.25:
            turns += [user("Thank you!"), assistant("You are welcome!")]
        yield [*turns, user(then), assistant(last)]


def joined(talks, rng):
    """Conversations of one to six exchanges, within the context of 512 tokens; some start with a system message."""
    talks, at = list(talks), 0
    while at < len(talks):
        system = rng.choice(SYSTEMS) if rng.random() < 0.08 else None
        messages = [{"role": "system", "content": system}] if system else []
        for _ in range(rng.choice([1, 1, 1, 2, 3, 4, 5, 6])):
            if at == len(talks) or messages and n_tokens(messages + talks[at]) > 470:
                break
            messages = messages + talks[at]
            at += 1
        yield messages


def n_tokens(messages):
    """An upper estimate of the tokens of a conversation."""
    return sum(12 + len(m["content"]) / 3 for m in messages)


def ask(a):
    rng = random.Random(a.seed)
    write(a.out, (request([user(question(rng))], i) for i in range(a.n)))


def follow(a):
    rng = random.Random(a.seed + 1)

    def requests():
        for i, messages in enumerate(answers(a.asked, a.said)):
            text = rng.choice(FOLLOWS) if rng.random() < 0.6 else question(rng)
            yield request([*messages, user(text)], 1_000_000 + i)

    write(a.out, requests())


def keep(a):
    rng = random.Random(a.seed + 2)
    twice = list(answers(a.asked2, a.said2))
    # A conversation of one turn whose second turn was kept is part of the longer one.
    begun = {json.dumps(messages[:2]) for messages in twice}
    once = [messages for messages in answers(a.asked, a.said) if json.dumps(messages) not in begun]
    talks = twice + once
    counts = collections.Counter()
    for messages in talks:
        counts.update({w for m in messages for w in WORD.findall(m["content"])})
    talks = [t for t in talks if all(counts[w] >= a.least for m in t for w in WORD.findall(m["content"]))]
    stories = [story.strip() for story in a.stories.read_text().split("<|endoftext|>")]
    stories = list(told(stories, rng))
    rng.shuffle(stories)
    hands = list(by_hand(rng, len(talks) // 8))
    n_talks, stories = len(talks), stories[: len(talks) // 2]
    talks += stories + hands
    rng.shuffle(talks)
    n_held = max(1, len(talks) // 50)
    a.out.mkdir(parents=True, exist_ok=True)
    held_out, kept = list(joined(talks[:n_held], rng)), list(joined(talks[n_held:], rng))
    write(a.out / "heldout-chat.jsonl", ({"messages": m} for m in held_out))
    write(a.out / "chat.jsonl", ({"messages": m} for m in kept))
    print(f"{len(twice)} conversations of two answers and {len(once)} of one, {n_talks} without rare words; {len(stories)} stories, "
          f"{len(hands)} by hand; {n_held} held out; {len(kept)} conversations of {len(talks) - n_held} talks")


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--seed", type=int, default=1)
    commands = args.add_subparsers(required=True)
    c = commands.add_parser("ask")
    c.add_argument("out", type=pathlib.Path)
    c.add_argument("--n", type=int, default=100_000)
    c.set_defaults(run=ask)
    c = commands.add_parser("follow")
    for name in ["asked", "said", "out"]:
        c.add_argument(name, type=pathlib.Path)
    c.set_defaults(run=follow)
    c = commands.add_parser("keep")
    for name in ["asked", "said", "asked2", "said2", "stories", "out"]:
        c.add_argument(name, type=pathlib.Path)
    c.add_argument("--least", type=int, default=12, help="drop conversations with a word that fewer conversations use")
    c.set_defaults(run=keep)
    a = args.parse_args()
    a.run(a)


if __name__ == "__main__":
    main()
