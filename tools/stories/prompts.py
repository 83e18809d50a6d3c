"""Subjects of the stories: hand-written word lists, and the prompts made from them."""

import random

GIRLS = """Lily Anna Mia Emma Sara Lucy Molly Ella Rosie Zoe Nina Clara Ruby Daisy Kate Amy Jane Maya Tara Poppy Ivy Grace
Nora Bella Hanna Leila Eva Holly Sophie Penny Tilly June Olive Wendy Maria Alice""".split()
BOYS = """Tom Ben Max Sam Jack Leo Tim Finn Noah Luke Oliver Theo Adam Peter Billy Henry Charlie Danny Omar Hugo Oscar Eli
Jake Will Toby Ravi Felix Simon Ned Paul Mark Arthur Joe Nick Alex Kofi""".split()
PETS = """Bobo Pip Coco Fluffy Spot Biscuit Pepper Teddy Buddy Snowy Muffin Pickles Bean Whiskers Milo Ginger Honey Nibbles
Patch Sunny Rusty Misty Bubbles Button Peanut Cookie Dot Momo Hazel Clover""".split()
ANIMALS = """dog cat rabbit bear mouse fox duck bird frog turtle owl pig cow horse sheep goat squirrel hedgehog lion tiger
elephant monkey penguin whale dolphin fish bee butterfly ant snail kitten puppy chick lamb deer dragon crab parrot swan
hen donkey beaver otter raccoon giraffe zebra koala caterpillar spider robin""".split()
PEOPLE = """farmer baker king queen prince princess fisherman gardener teacher sailor painter grandmother grandfather
shepherd builder cook doctor musician tailor mailman giant wizard fairy robot snowman""".split()
THINGS = """ball kite hat boat book cake apple tree flower star moon box key bell basket drum lamp mirror blanket cup spoon
doll train car bike rope ladder bridge door window chair bed pillow candle coat shoe sock scarf button ring stone shell
feather leaf seed nest egg honey bread soup cookie pie carrot berry banana pumpkin cheese milk balloon puzzle pencil
crayon picture letter map coin wagon bucket shovel broom umbrella puddle rainbow cloud snow sun rock log stick mud song
story game toy tower castle sandcastle garden fence swing slide tent flashlight whistle guitar piano clock bag backpack
gift ribbon cart mill well pond nest lantern rocket teapot necklace paintbrush jar kettle mitten sled""".split()
PLACES = """forest garden park farm village river lake beach hill mountain meadow school kitchen barn cave market library
playground zoo island house pond field tower bridge street yard town castle bakery orchard harbor treehouse valley
attic shop desert jungle cottage""".split()
VERBS = """jump run swim climb dance sing hide find help share build bake paint draw dig plant throw catch push pull carry
open close fix break lose look listen whisper shout laugh cry smile hug wave sleep dream wake eat drink taste cook wash
clean read write count learn teach play race ride fly float fall slip roll bounce swing follow wait promise ask give
thank forgive try explore travel visit knock tie cut touch feel hear chase rescue save""".split()
QUALITIES = """happy sad brave kind shy angry tired hungry funny clever silly gentle lonely proud scared sleepy quiet loud
big little tiny tall round soft warm cold wet shiny dark bright old new red blue green yellow purple golden sweet sour
slow fast strong careful curious lucky lazy grumpy polite honest patient messy clean broken lost magic secret pretty
heavy light deep smooth fuzzy""".split()
TURNS = """they learn to share
they find something in the grass
they help a friend
they get lost and come home again
they make a mistake and say sorry
they are afraid of the dark
they make a new friend
they lose a toy and find it again
it rains all day
they try again and again
they plant a seed
they have a birthday
they take a walk together
they build something together
someone is sick and needs help
they tell the truth
they see snow for the first time
they cannot sleep
a storm comes
they want to fly
they go on a boat
they cook dinner together
they find a baby bird
they have a race
they clean up a mess
they learn a new song
they look at the stars
they say goodbye
they give a gift
something breaks and they fix it
they are too loud and then quiet
they have to wait for a long time
they meet a stranger who is kind
they find a secret door
they go to the market
they play hide and seek
they have a silly dream
they help their mother
they help an old man
they share their food""".split("\n")

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
# Shared prefix of all prompts: its keys and values are computed once and stay in the cache.
SHARED = f"""<|im_start|>system
{SYSTEM}<|im_end|>
<|im_start|>user
Write a very short story for a small child. Use only simple words and short sentences. Write about"""
OPENINGS = [
    "Once upon a time, there was {hero}.",
    "Once upon a time, there was {hero}.",
    "Once upon a time, there was {hero} who",
    "Once upon a time, there lived {hero}.",
    "Once upon a time, in {a_place},",
    "Once upon a time,",
    "Once upon a time",
    "One day, {name} went to the {place}.",
    "One day, {name} found {a_thing}.",
    "One day, {name} wanted to {verb}",
    "One day, {name}",
    "One sunny morning, {name}",
    "{name} was {hero_kind}. One day,",
    "{name} had {a_quality} {thing}.",
    "{name} loved to {verb}.",
    "{name} was {quality}.",
    "There was once {hero}.",
    "It was a {weather} day.",
    "It was bedtime, and {name}",
    "{name} and {friend} were friends.",
    "{name} and {friend} were playing",
    "The {quality} {thing}",
    "Long ago, in {a_place},",
]
WEATHER = "sunny rainy windy snowy cold warm hot beautiful".split()


def article(word):
    return ("an " if word[0] in "aeiou" or word.startswith("honest") else "a ") + word


def hero(rng):
    """The hero with a description, and the name."""
    quality = rng.choice(QUALITIES + ["little"] * 20) if rng.random() < 0.6 else None
    kind = rng.random()
    if kind < 0.5:
        girl = rng.random() < 0.5
        who, name = ("girl", rng.choice(GIRLS)) if girl else ("boy", rng.choice(BOYS))
    elif kind < 0.87:
        who, name = rng.choice(ANIMALS), rng.choice(PETS + GIRLS + BOYS)
    else:
        who = rng.choice(PEOPLE)
        return article(f"{quality} {who}" if quality else who), f"The {who}"
    return article(f"{quality} {who}" if quality else who) + f" named {name}", name


def suffix(rng):
    """The part of a prompt that differs from story to story, ending in the story's first words."""
    who, name = hero(rng)
    other, friend = hero(rng)
    thing, verb, quality, place = rng.choice(THINGS), rng.choice(VERBS), rng.choice(QUALITIES), rng.choice(PLACES)
    opening = rng.choice(OPENINGS)
    parts = [f" {who}"]
    if "{friend}" in opening or rng.random() < 0.25:
        parts.append(f" and {other}")
    if "{thing}" in opening or rng.random() < 0.3:
        parts.append(f" and {article(thing)}")
    if "{place}" in opening or rng.random() < 0.3:
        parts.append(f" in {article(place)}")
    parts.append(".")
    if rng.random() < 0.5:
        parts.append(f" In it, {rng.choice(TURNS)}.")
    elif rng.random() < 0.7:
        words = [thing, verb, quality]
        rng.shuffle(words)
        parts.append(f" Use the words {words[0]}, {words[1]} and {words[2]}.")
    text = opening.format(
        hero=who,
        hero_kind=who.split(" named ")[0],
        name=name if opening.startswith("{name}") else name.replace("The ", "the "),
        friend=friend.replace("The ", "the "),
        thing=thing,
        a_thing=article(thing),
        a_quality=article(quality),
        a_place=article(place),
        verb=verb,
        quality=quality,
        place=place,
        weather=rng.choice(WEATHER),
    )
    return "".join(parts) + f"<|im_end|>\n<|im_start|>assistant\n{text}"


def suffixes(n, seed):
    rng = random.Random(seed)
    return [suffix(rng) for _ in range(n)]
