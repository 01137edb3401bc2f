"""Generate the five small data sets that ship with nanolm. All text is original to this file.

tiny.txt     about 5 kB of sentences with a vocabulary of a dozen words. The grammar is known
             exactly (GRAMMAR below), so a model's probabilities can be checked against it.
stories.txt  about 1 MB of short children's stories to train a small language model.
reviews.tsv  9,600 labelled reviews to fine-tune a classifier. Only word order reveals the label.
dates.tsv    10,000 spellings of 5,000 dates, each with the date as 1998-05-03.
veltish.tsv  12,000 English sentences with their translation into a made-up language. A program
             (translate_to_veltish below) says which translation is right.

`python data/generate.py` writes them next to this file, or to `--out DIR`. The bytes are the same
on every platform. With `--check`, it only compares the existing files and writes nothing.
"""

import argparse
import math
import random
import re
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Dice:
    """Random choices that use only `random.Random.random()`, which is stable across versions."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def below(self, n: int) -> int:
        return int(self._random() * n)

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def chance(self, p: float) -> bool:
        return self._random() < p

    def shuffle(self, items: list[T]) -> None:
        for i in range(len(items) - 1, 0, -1):
            j = self.below(i + 1)
            items[i], items[j] = items[j], items[i]


# ---------------------------------------------------------------------------------------------
# tiny.txt
# ---------------------------------------------------------------------------------------------

END = "end"

# From each state, all (word, next state) choices are equally likely. No state offers the same
# word twice, so every sentence has exactly one derivation. "." is the full stop.
GRAMMAR: dict[str, list[tuple[str, str]]] = {
    "start": [("the", "subject"), ("a", "subject")],
    "subject": [("small", "noun"), ("cat", "verb"), ("dog", "verb"), ("bird", "verb")],
    "noun": [("cat", "verb"), ("dog", "verb"), ("bird", "verb")],
    # Transitive verbs need an object, intransitive verbs do not take one.
    "verb": [
        ("sees", "needs object"),
        ("likes", "needs object"),
        ("chases", "needs object"),
        ("sleeps", "clause done"),
        ("sings", "clause done"),
    ],
    "needs object": [("the", "object"), ("a", "object")],
    "object": [
        ("small", "object noun"),
        ("cat", "object done"),
        ("dog", "object done"),
        ("bird", "object done"),
    ],
    "object noun": [("cat", "object done"), ("dog", "object done"), ("bird", "object done")],
    # After an object, "and" joins a second verb: "the cat sees a bird and sings."
    "object done": [(".", END), ("and", "last verb")],
    # After an intransitive verb, "and" joins a second clause: "the cat sleeps and a dog sings."
    "clause done": [(".", END), ("and", "second clause")],
    "second clause": [("the", "second noun"), ("a", "second noun")],
    "second noun": [("cat", "last verb"), ("dog", "last verb"), ("bird", "last verb")],
    "last verb": [("sleeps", "stop"), ("sings", "stop")],
    "stop": [(".", END)],
}


def tiny_sentence(rng: Dice) -> str:
    """Draw one sentence of the grammar."""
    words: list[str] = []
    state = "start"
    while state != END:
        word, state = rng.pick(GRAMMAR[state])
        words.append(word)
    return " ".join(words[:-1]) + "."


def _tiny_state(text: str) -> str | None:
    """The state after `text`, or None if no sentence can begin with it."""
    words = text.removesuffix(".").split(" ") if text else []
    if text.endswith("."):
        words.append(".")
    state = "start"
    for word in words:
        following = dict(GRAMMAR.get(state, []))
        if word not in following:
            return None
        state = following[word]
    return state


def tiny_allows(sentence: str) -> bool:
    """Whether this line is a complete sentence of the grammar."""
    return _tiny_state(sentence) == END


def tiny_allows_prefix(words: str) -> bool:
    """Whether a sentence of the grammar can begin with these whole words."""
    return _tiny_state(words) is not None


def tiny_entropy() -> float:
    """Expected nats per sentence: the mean of -log p(sentence), full stop included."""

    def below(state: str) -> float:
        if state == END:
            return 0.0
        choices = GRAMMAR[state]
        return math.log(len(choices)) + sum(below(after) for _, after in choices) / len(choices)

    return below("start")


def tiny_probabilities() -> dict[str, float]:
    """All 1,608 sentences of the grammar with their probabilities, which sum to one."""

    def after(state: str, words: tuple[str, ...], p: float) -> Iterator[tuple[str, float]]:
        if state == END:
            yield " ".join(words[:-1]) + ".", p
        else:
            choices = GRAMMAR[state]
            for word, following in choices:
                yield from after(following, (*words, word), p / len(choices))

    return dict(after("start", (), 1.0))


def tiny_bits_per_byte(sentences: Sequence[str]) -> float:
    """Bits per byte of these sentences, one per line, under the grammar itself."""
    probabilities = tiny_probabilities()
    bits = -sum(math.log2(probabilities[sentence]) for sentence in sentences)
    return bits / sum(len(sentence) + 1 for sentence in sentences)


def fresh_tiny(count: int, seed: int = 2) -> list[str]:
    """New samples from the grammar. Some also occur in tiny.txt, whose 145 distinct sentences
    have a total probability of 0.24."""
    rng = Dice(seed)
    return [tiny_sentence(rng) for _ in range(count)]


def make_tiny(size: int = 5_000) -> str:
    rng = Dice(1)
    lines: list[str] = []
    while sum(len(line) + 1 for line in lines) < size:
        lines.append(tiny_sentence(rng))
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------------
# stories.txt
#
# A plot is written in a small notation, one story beat after another:
#
#   @x,y = a,b / c,d   draw "a" for {x} and "b" for {y}, or "c" and "d"; fixed for the story
#   = text             a beat: what happens next
#   | text             another way to tell the same beat; one of them is picked
#   ~ text             a beat that is often skipped
#   (blank line)       a new paragraph
#   [a|b]              pick one of these words
#
# {A} is the hero and {B} a friend, {C} a grown-up; {he} {him} {his} are the hero's pronouns,
# {he2} {him2} {his2} the friend's and {he3} {him3} {his3} the grown-up's, with {He} and so on
# where a sentence begins. Any telling of a beat must fit any telling of the beats around it.
# ---------------------------------------------------------------------------------------------

GIRLS = "Lily Anna Mia Ella Nora Sara Ruby Lucy Zoe Maya Ivy Emma Clara Tess"
BOYS = "Tom Ben Max Sam Leo Finn Jack Noah Oscar Hugo Theo Adam Peter Dan"
GROWN_UPS = {
    "f": ["Grandma", "Mama", "Aunt Rose", "Aunt May"],
    "m": ["Grandpa", "Papa", "Uncle Joe", "Uncle Fred"],
}
# Animal heroes, name and kind; the first two of each row are the fast runners.
ANIMALS = {
    "f": ["Clover rabbit", "Willow hare", "Hazel squirrel", "Dot hedgehog", "Poppy mouse"],
    "m": ["Rusty fox", "Flint weasel", "Bruno bear", "Otto otter", "Bramble badger"],
}
WISE_ANIMALS = {"f": ["Old Owl", "Old Goose"], "m": ["Old Toad", "Old Tortoise"]}
PRONOUNS = {"f": "she her her herself", "m": "he him his himself"}

# Phrases that many plots share, drawn afresh wherever they are used.
SHARED = {
    "home": "[in a white house near the river|at the edge of a village|on a farm"
    "|at the end of a long street|in a tall house by the park|in a town by the sea]",
    "nice": "[little|small|cheerful|quiet|kind|clever|lively]",
    "intro": "[{A} was a {nice} {kid} who lived {home}."
    "|Once there was a {nice} {kid} called {A}, who lived {home}."
    "|There was once a {nice} {kid} whose name was {A}. {He} lived {home}."
    "|{A} lived {home} with {his} family.]",
    "wild": "[under the roots of an old oak|at the edge of the forest|beside a clear stream"
    "|in a warm den on the hill|deep in the green forest]",
    "wild_intro": "[{A} was a {nice} {kid} who lived {wild}."
    "|Once there was a {nice} {kid} called {A}, who lived {wild}."
    "|{A} the {kid} lived {wild}.]",
    "fine": "[sunny|bright|warm|clear|fine]",
    "asked_sadly": "[said {A} sadly|said {A} in a small voice|whispered {A}]",
    "joy": "[{A} jumped up and down with joy.|{A} laughed out loud.|{A} could not stop smiling."
    "|{A} felt as light as a feather.]",
}

LOST_THING = """
@colour = red / blue / green / yellow / white
@thing = ball / hat / scarf / whistle / wooden horse / toy train
@place,in = the park,in the park / the pond,by the pond / the orchard,in the orchard
@spot = under an old bench / behind a fallen tree / in the long grass / between two big stones
@odd = an old shoe / a rusty spoon / a broken cup / a grey feather

= {intro} Of all {his} things, {he} loved a {colour} {thing} best, because it was a present from
  {C}.
| {A} had a {colour} {thing} that {C} had given {him}. {He} took it everywhere, [even to bed|even to
  breakfast|in sun and in rain].
| When {A} turned [five|six|seven], {C} gave {him} a {colour} {thing}. There was nothing in the
  world {he} loved more.
| {intro} Wherever {he} went, {he} carried a {colour} {thing}. It was not new, but {C} had given it
  to {him}, and so it was special.
= One {fine} morning {he} took it along to {place} and played there until noon.
| On Sunday {he} spent the whole morning {in}, and of course the {thing} came too.
| One day, after breakfast, {he} ran to {place} with the {thing} in {his} hand.
= But when {he} came home, {his} hands were empty. The {colour} {thing} was gone!
| That evening {he} wanted to put the {thing} on its shelf, but it was not there.
| At supper {C} asked, "Where is your {colour} {thing}?" {A} looked around and turned pale.

= {He} looked under the bed, behind the door and inside every box.
| {He} turned the whole house upside down, from the kitchen to the attic.
| First {he} searched {his} room. Then {he} searched the kitchen, and after that the stairs.
~ There were many things there, but no {thing}.
| But the {colour} {thing} was nowhere to be found.
| All {he} found was [a lot of dust|an old sock|one small button].
~ "What shall I do?" {asked_sadly}. "It was a present."
| A big tear ran down {his} cheek. "It is gone for ever," {he} thought.
| {A} sat down on the floor and [cried a little|hid {his} face].

= The next morning {B} from next door came to play. "Why are you so sad?" {he2} asked.
| Early the next day, {B} knocked at the door. {He2} saw at once that something was wrong.
| The next day {A}'s friend {B} came by.
= "I have lost my {thing}," said {A}. "Then we will find it," said {B}. "Where did you have it
  last?"
| {A} told {him2} what had happened. "Do not cry," said {B}. "Four eyes see more than two."
| "My {thing} is lost, and I have looked everywhere," said {A}. "Everywhere?" asked {B}. "Think
  hard. Where did you play yesterday?"
= {A} thought and thought. "I was {in}!" {he} said at last.
| "Yesterday morning," said {A} slowly, "I was {in}. Let us go there!"
| {A} closed {his} eyes and tried to remember. "We must go back to {place}," {he} said.

= So they walked to {place} and searched it step by step.
| The two friends ran to {place} as fast as they could.
| Hand in hand they went to {place}. The grass was still wet with dew.
~ They found {odd}, but it was not what they were looking for.
| Under a bush lay {odd}. "Somebody else has lost something too," said {B}.
| {A} picked up {odd} and put it down again. "That is not it," {he} said.
= Then {B} gave a shout. Something {colour} was lying {spot}.
| Suddenly {B} stopped and pointed. "What is that, {spot}?" {he2} cried.
| They were about to give up when {B} saw something {colour} {spot}.
= It was the {thing}! It was [a little dirty|a little wet|covered with leaves], but it was not
  broken.
| There lay the {colour} {thing}, as if it had been waiting for them.
| {A} ran to look, and there it was: the {colour} {thing}, safe and sound.

= "Thank you, {B}!" said {A}. "Without you I would never have found it."
| {A} held the {thing} tight and gave {B} a big hug.
| {joy} "You are the best friend in the world," {he} told {B}.
= When {C} heard the story, {he3} smiled. "A thing can be lost," {he3} said, "but a good friend
  helps you look."
| From that day on, {A} always counted {his} things before going home.
| That night the {colour} {thing} was back on its shelf, and {A} slept very well.
| "Next time I will look after it better," {A} promised. And {he} did.
"""

PRESENT = """
@gift,how,flaw = necklace,threaded the beads one by one,a little too long / card,painted it with
  great care,a little crooked / basket,wove it out of thin sticks,a little crooked / cup,shaped it
  out of clay,a little bent
@colour = blue / green / yellow / purple
@price = lamp / clock / mirror / teapot

= {intro} Soon it would be {C}'s birthday, and {A} had no present yet.
| In three days it would be {C}'s birthday. {A} wanted to give {him3} something wonderful.
| "Tomorrow is {C}'s birthday," thought {A}, "and I still have no present!"
= In the window of the shop there was a beautiful {price}. But {A} had only two coins, and the
  {price} cost ten.
| {He} opened {his} money box and shook it. Only two small coins fell out, and that was not enough
  for the {price} in the shop window.
| {He} went to the shop and looked at a fine {price}. "That will be ten coins," said the man. {A}
  had only two.

= {He} walked home slowly and met {B} on the way. "I am too poor to buy a present," {asked_sadly}.
| That afternoon {he} was very quiet. "What is the matter?" asked {his} friend {B}. "I cannot buy a
  present," said {A}. "I have only two coins."
| {A} sat down on the steps in front of the house. Soon {B} came and sat beside {him}. "I have no
  money for a present," {asked_sadly}.
= "Then make one!" said {B}. "The best presents are made by hand."
| {B} thought for a moment. "You do not need money," {he2} said. "You have two hands."
| "Last year I made something for my mother," said {B}, "and she still keeps it by her bed. You can
  do that too."
= {A}'s eyes grew bright. "I will make a {colour} {gift}," {he} said, "because {colour} is the
  colour {C} likes best."
| {A} jumped up. "I know what I will make!" {he} said. "A {colour} {gift} for {C}!"
| "You are right!" cried {A}. "{C} loves the colour {colour}. I will make a {colour} {gift}!"

= That afternoon {he} worked at the kitchen table and {how}.
| {He} went to {his} room, closed the door and began. With {B}'s help {he} {how}.
| All afternoon {he} sat in the shed with {B}, and slowly {he} {how}.
~ It was not easy. The first {gift} fell apart, and {he} had to start again.
| Once {he} nearly gave up, but {B} said, "You are almost there."
| {His} fingers hurt, but {he} did not stop until the sun went down.
= At last the {colour} {gift} was ready. It was {flaw}.
| In the end there it was, a {colour} {gift}. It was {flaw}, but it was pretty.
~ "Do you think {he3} will like it?" asked {A}. "I am sure," said {B}.
| {A} looked at it and felt [worried|shy]. "What if {he3} does not like it?" {he} asked. "Wait and
  see," said {B}.

= On the birthday there was a cake with candles, and everybody sang.
| When the great day came, the whole family sat around the table.
| The birthday was a {fine} day, and there were flowers on the table.
= With red cheeks, {A} put the {gift} into {C}'s hands.
| "This is from me," said {A} in a small voice, and {he} gave {C} the {colour} {gift}.
| {A} waited until the end. Then {he} held out {his} present and said, "I made it myself."
= {C} looked at it for a long time. Then {he3} hugged {A} and said, "This is the best present of
  all."
| "You made this for me?" said {C}, and there were happy tears in {his3} eyes.
| {C} smiled from ear to ear. "A {colour} {gift}! It is just what I wanted," {he3} said.

= {joy} The {price} in the shop was [soon forgotten|not important any more].
| From then on, the {colour} {gift} had a place of honour beside {C}'s bed.
| "{B} was right," thought {A}. "A present made with love is worth more than ten coins."
~ The next day {A} ran to {B} and told {him2} everything. "Thank you for your good advice," {he}
  said.
| And what did {A} do with the two coins? {He} bought two sweet buns, one for {B} and one for
  {himself}.
"""

STORM = """
@P,pet,phe = Biscuit,dog,he / Pepper,cat,she / Muffin,dog,she / Socks,cat,he
@ruin,fixed = the roof of the henhouse,nailed new boards on the roof / the garden fence,put up all
  the posts again / the little bridge,laid new boards on the bridge
@whose = Mrs Reed / Mr Hill / Mrs Wood / Mr Bell

= {intro} {His} best friend was a {pet} called {P}.
| {A} had a {pet} called {P}. The two of them did everything together.
| Wherever {A} went, a {pet} called {P} went too.
= One evening dark clouds came over the hills, and the wind began to blow.
| One hot day the sky turned grey, then black. "A storm is coming," said {C}.
| All day the air had been heavy. In the evening the first drops fell on the roof.
~ Soon the rain beat against the windows and the thunder rolled.
| The trees bent in the wind, and the whole house seemed to shake.
| Then the lightning flashed, and the thunder was so loud that the cups shook.
= {P} the {pet} crept under the bed and would not come out.
| {P} the {pet} pressed close to the wall and shook from nose to tail.
| {P} the {pet} was so afraid that {phe} hid behind the big chair.

= {A} was afraid too, but {he} [sat down on the floor|lay down on the floor] and spoke softly. "I am
  here, {P}," {he} said. "I will stay with you."
| "Do not be afraid, {P}," said {A}, though {his} voice was shaking. {He} sat down on the floor and
  did not leave {P} alone.
| {A}'s own heart beat fast. Still, {he} sat down near {P} and began to sing a quiet song.
~ {C} came in with a candle. "A storm is only wind and water," {he3} said. "It cannot come in."
| Then {C} brought hot milk, and they told each other stories until it was late.
= Little by little the thunder moved away, and at last they all fell asleep.
| Slowly the storm grew tired. When the last thunder was gone, {A} and {P} were already asleep.
| Long after midnight the rain stopped. {A} and {P} were asleep by then, side by side.

= In the morning the sun was shining, but the storm had broken {ruin}.
| When {A} looked out the next morning, the sky was blue again. But the storm had broken {ruin}.
| The next day the world was wet and bright. Branches lay everywhere, and {ruin} was broken.
= It belonged to old {whose}, who lived alone.
| Old {whose}, the neighbour, stood in front of it and looked very sad.
= "How can I ever mend this by myself?" {whose} sighed.
| "I am too old for such work," said {whose}.
= "You do not have to do it alone," said {A}. "Wait here!"
| "Many hands can do it," said {A}. "I will be back soon!"
| {A} did not think twice. "We will help you," {he} said.

= {He} ran from door to door. {B} came with a hammer, {C} brought a saw, and many others came too.
| {He} called {B}, and {B} called everyone in the street. Soon there were ten people with tools.
= All morning they worked together. They sawed and hammered and {fixed}.
| They worked and laughed and sang. By the afternoon they had {fixed}.
| Some carried wood and some held the ladder. Before noon they had {fixed}.
~ Even {P} helped, and carried away the small sticks.
| {P} ran around their feet and seemed to have forgotten all about the thunder.

~ "Now it is better than before," said {whose}. "How can I thank you?" "You do not need to," said
  {A}. "That is what neighbours are for."
| {whose} shook every hand and made hot soup for them all.
= That night the wind blew again, but only a little. {P} looked at {A}, yawned and went to sleep.
| In the evening {A} said to {P}, "Storms are loud, but friends are stronger." {P} put one paw on
  {his} knee.
| When {A} went to bed, {he} was tired and proud. {P} lay at {his} feet and did not hide any more.
"""

RACE = """
@cast = runners
@goal = the old mill / the big rock / the tall pine / the stone bridge
@prize = a basket of berries / a pot of honey / a bag of nuts
@hurt = caught {his2} foot in a root / slipped on a wet stone / fallen into a deep ditch

= {wild_intro} {He} was the fastest runner far and wide, and {he} knew it.
| Nobody in the forest ran as fast as {A} the {kid}. {He} ran before breakfast, and {he} ran after
  supper.
| {A} the {kid} had the fastest feet in the forest. When {he} ran, the others saw only a cloud of
  dust.
= Every autumn there was a great race to {goal}. The prize was {prize}.
| One {fine} day {C} called all the animals together. "Tomorrow there will be a race to {goal},"
  {he3} said, "and the winner will get {prize}."
= "I shall win," said {A}. "[That is certain|Nobody can catch me]."
| "The prize is as good as mine," said {A}, and {he} went to bed early.
= {B} the {kid2} wanted to run too. "I am not so fast," {he2} said, "but I like to run."
| Even {B} the {kid2} came. "I will surely be last," {he2} said, "but it will be fun."

= In the morning {C} lifted a leaf and let it fall. The race began!
| The next morning everybody stood in a row. "Go!" cried {C}, and they ran.
| "One, two, three!" called {C}, and off they went.
= {A} shot ahead like an arrow. The wind whistled in {his} ears.
| At once {A} was in front, and nobody could keep up with {him}.
| Soon {A} was far in front. Behind {him} the others grew smaller and smaller.
~ Over the stream and through the ferns {he} ran, until {he} could already see {goal}.
| {He} ran around the pond and up the hill, and there, not far away, was {goal}.

= Just then {he} heard a cry. {B} had taken another path and had {hurt}.
| But what was that? "Help!" cried a small voice. It was {B}, who had tried a short way and had
  {hurt}.
~ {A} stopped. {He} looked at {goal}, and {he} looked back.
| For a moment {A} did not know what to do. The others were coming closer.
= "If I stop now, I will lose," {he} thought. "But if I go on, who will help {B}?"
| "A prize is nice," {he} thought, "but a friend is more important."
= Then {he} turned around and ran back as fast as {he} could.
| {He} did not think any longer. {He} went back to help.
| So {he} left the path and hurried to {his} friend.

= "Does it hurt?" asked {A}. "Only a little," said {B}, "but I cannot walk alone."
| "You came back!" said {B}. "But what about the race?" "Never mind the race," said {A}. "Hold on to
  me."
= Slowly, step by step, they went on together. They were the very last to reach {goal}.
| It was a slow walk, and the sun was low when they came to {goal}. Everyone else had been there for
  a long time.
| {A} held {B} up, and so they walked to {goal}. All the others were there already.
~ But nobody laughed. The animals clapped and cheered.
| To their surprise, all the animals stood up and cheered.

= "There are many fast runners," said {C}, "but a true friend is hard to find."
| "Anyone can run past a friend," said {C}. "It takes a big heart to stop."
| {C} nodded wisely. "Today {A} has won something better than a race," {he3} said.
~ The winner shared the prize, {prize}, with everyone.
| In the end everybody shared the prize, and {A} and {B} got the first taste.
= From then on, {A} and {B} went running together, not to win, but for fun.
| {B}'s foot was soon well again, and every evening the two friends ran side by side.
| {A} was still the fastest in the forest, but {he} never boasted again.
"""

BROKEN_TOY = """
@colour = red / blue / green / yellow
@toy,part = toy boat,mast / toy train,wheel / toy plane,wing / wooden horse,leg / toy cart,wheel

= {B} had a {colour} {toy}, and {he2} kept it on the highest shelf. {A}, {his2} best friend, thought
  it was the finest toy in the world.
| {intro} {His} friend {B} had a {colour} {toy}. It was very old and very beautiful.
| {A} and {B} were friends and shared almost everything. But there was one thing {B} did not share,
  and that was a {colour} {toy}.
= "Please do not touch it while I am out," said {B} one {fine} afternoon. "It breaks easily."
| One rainy afternoon {A} came to visit. "You may play with everything but the {toy}," said {B}, and
  {he2} went to fetch some milk.
= But as soon as {he} was alone, {A} climbed on a chair and took the {toy} down.
| Then {A} was alone in the room. "I will only look," {he} thought, and {he} lifted the {toy} down
  from the shelf.
| {A} waited a little. Then {he} reached up and took the {toy} from the shelf, just for a moment.

= Crack! It slipped out of {his} hands and fell, and the {part} broke off.
| It was heavier than {he} had thought. It slipped, it fell, and the {part} broke off.
| {He} turned it around once. Then it fell to the floor with a crack, and the {part} broke off.
= {A}'s heart beat fast. {He} pushed the pieces under the bed and ran home.
| "Oh no," whispered {A}. {He} hid the pieces behind a box and went home without a word.
| {A} turned red, then white. Quickly {he} hid the pieces under a pillow and said that {he} had to
  go home.
~ That evening {he} could not eat {his} supper. In the night {he} could not sleep.
| All evening {he} thought of nothing else. The soup had no taste, and {his} bed felt hard.
= "What is the matter?" asked {C}. And then {A} told {him3} everything.
| At last {he} went to {C} and told {him3} the whole story.
= "You cannot undo it," said {C}, "but you can tell the truth. It is hard, but it helps."
| "I think you know what to do," said {C} kindly. "The truth is the shortest way."
| "Everybody breaks something one day," said {C}. "What matters is what you do next."

= So the next morning {A} went to {B}. {His} knees were shaking.
| As soon as the sun was up, {A} went to see {B}. {He} had practised the words all night.
| The next day {A} walked to {B}'s house. It had never seemed so far away.
= "I broke your {toy}," {he} said. "I took it down when you were not there, and I am very sorry."
| "{B}, I have done something wrong," {he} said. "I broke the {part} of your {toy}, and then I hid
  it. I am so sorry."
= {B} was quiet for a long time. "I am sad about it," {he2} said, "but I am glad that you told me."
| At first {B} was angry, and there were tears in {his2} eyes. Then {he2} said, "It was brave of you
  to tell me."
= "May I try to mend it?" asked {A}.
| "Let me help to mend it," said {A}, "even if it takes all day."
| "I will mend it," said {A}. "I promise."

= They took the pieces to {C}, who had strong glue and a box full of tools.
| {C} gave them glue, a small brush and some {colour} paint.
= {A} held the {part} in its place until the glue was dry. It took a very long time, but {he} did
  not complain.
| Together they glued the {part} back on. {A} worked so carefully that {he} hardly dared to breathe.
| They worked for a long time. {B} held the {toy}, and {A} put the {part} back with a drop of glue.
~ In the end one could see only a thin line where the {part} had broken.
| By the evening the {colour} {toy} looked almost like new.

~ "It is even better now," said {B}, "because we mended it together."
| {B} smiled for the first time that day. "Now you may play with it too," {he2} said, "but only with
  me."
= {A} had learned that a lie is heavy, and that the truth makes the heart light.
| That night {A} slept deeply, because {he} had nothing to hide.
| And from that day on, when {A} made a mistake, {he} said so at once.
"""

SHARING = """
@cast = animals
@food = nuts / apples / berries / seeds / mushrooms
@store = hollow tree / little cave / dry cellar / deep hole

= {wild_intro} All summer long {he} gathered {food} and carried them to a {store}.
| The leaves were falling, and {A} the {kid} was busy. Day after day {he} carried {food} to a
  {store}.
| Winter was coming. {A} the {kid} worked from morning to evening, until {his} {store} was full of
  {food}.
~ "These are mine, all mine," {he} said, and {he} counted them twice.
| "Now I have enough," {he} said proudly. "Nobody has as many {food} as I have."

= Then the snow came, soft and deep. One cold evening somebody knocked.
| Winter came in one night, white and silent. A few days later somebody knocked.
| One night the first snow fell, and the wind was icy. The next day there was a knock.
= It was {B} the {kid2}, and {he2} was shaking with cold. "The rain washed all my food away," {he2}
  said. "Could you give me a little?"
| There stood {B} the {kid2} with snow on {his2} nose. "A thief has taken all my food," {he2} said.
  "I have not eaten for two days."
| Outside stood {B} the {kid2}, thin and wet. "I was ill all autumn and could not gather food,"
  {he2} said. "I am so hungry."
= {A} looked at {his} {food}. "If I share them, there will be less for me," {he} thought.
| {A} frowned. "I worked hard for my {food}," {he} thought.
= But then {he} saw {B}'s sad eyes, and {he} felt ashamed. "Come in," {he} said. "There is enough
  for two."
| But {B} looked so lonely in the cold white snow. "Come in," said {A}. "We will share."
| Then {he} remembered how it feels to be hungry. "Come in and sit down," {he} said. "What is mine
  is yours."

= They ate together, and the {food} tasted better than ever before.
| {A} put {food} on the table, as many as there was room for, and they ate until they were full.
| {A} filled a bowl to the top and gave it to {B}, who ate until {he2} was warm again.
~ {B} could tell wonderful stories, and the long evening seemed short.
| After the meal {B} sang an old song, and {A} sang along. It was the first time in weeks that {he}
  had laughed.
~ "I will never forget this," said {B}.
| "One day I will do something for you," {B} promised.

= In the middle of the winter a big rock rolled in front of the {store}, and {A} could not reach
  {his} food.
| But the winter was long. One night thieving crows found the {store}, and in the morning it was
  empty.
| Then, late in the winter, the stream rose in the night and carried all of {A}'s {food} away.
~ {A} sat in the snow and did not know what to do.
| "Now I am the poor one," {asked_sadly}.
= But soon {B} came through the snow. {He2} had told all the animals how kind {A} had been, and each
  of them had sent something.
| When {B} heard the bad news, {he2} told everyone in the forest. Soon they all came, and nobody
  came with empty hands.
| {B} heard of it and ran from den to den. "{A} helped me," {he2} said. "Now we must help {him}."
  And everybody gave a little.
= Soon there was bread and cheese and dried fruit on the table, enough for many weeks.
| There was so much food that {A} did not know what to say.
| Before night there was a great heap of good things in front of {A}'s door.

~ "You see," said {C}, "what you give away comes back to you."
| {C} had seen it all. "A full cellar is good," {he3} said, "but good neighbours are better."
= When spring came, {A} and {B} gathered food side by side, and they shared one {store}.
| And every winter after that, {A} and {B} sat at the same table.
| The next autumn {A} gathered {food} again. But this time {he} said, "These are ours."
"""

SKILL = """
@skill,fail,win = ride a bicycle,the bicycle shook and fell over,rode all the way to the gate /
  swim,{he} swallowed water and coughed,swam all the way to the little island / skate,{he} slipped
  and sat down hard,skated all the way across the ice / climb a rope,{his} hands slipped and {he}
  slid down,climbed all the way to the top
@days = three / four / five / six

= {intro} There was one thing {he} wanted more than anything else. {He} wanted to {skill}.
| All of {A}'s friends could {skill}. Only {A} could not.
| {A}'s friend {B} knew very well how to {skill}. "I want to do that too!" thought {A}.
= One {fine} morning {he} tried it alone, but {fail}.
| One day {he} tried it when nobody was looking. But {fail}.
| {He} got up very early, when everybody was still asleep, and tried it. But {fail}.
~ Some big children saw it and laughed. "{A} will never learn it," they said.
| {He} tried again and again, and each time {fail}.

= {A} ran home with tears in {his} eyes. "I will never try again," {he} said.
| "I am no good at it," said {A}, and {he} hid in {his} room.
| "It is no use," {asked_sadly}. {He} kicked a stone and went home.
= {C} dried {his} tears. "Nobody can do it on the first day," {he3} said. "Even birds must learn to
  fly."
| "Do you know how often I failed when I was small?" asked {C}. "A hundred times. And each time I
  tried again."
= Then {B} came to the door. "I can help you," {he2} said. "If you promise not to give up, I promise
  to come every day."
| The next morning {B} was waiting outside. "I will teach you," {he2} said, "but you must promise me
  not to give up."
= {A} thought about it. "I promise," {he} said.
| {A} dried {his} face. "I will not give up," {he} said. "I promise."
| "That is a promise," said {A}, and they shook hands.

= On the first day it went badly, for {fail}. On the second day it was a little better.
| They began at once. At first {fail}, but {A} tried again.
| The first lesson was hard. More than once {fail}, but {B} only said, "Again!"
~ "Do not look down," said {B}. "Look at the place where you want to go."
| "Slowly," said {B}. "You are in too much of a hurry."
| "Breathe in, breathe out, and do not be afraid," said {B}.
~ Once it rained, and {A} wanted to stay in bed. But {he} remembered {his} promise and went.
| In the evening {A} was tired, and {his} arms and legs hurt. Still, {he} came back the next day.
= {B} kept {his2} word and came every day, even when the wind was cold.
| Morning after morning {B} was there, because a promise is a promise.
| Every day {B} was there, just as {he2} had promised.

= After {days} days {A} took a deep breath and tried once more. And this time {he} {win}!
| And after {days} days the great moment came. {A} was not afraid any more. {He} {win}!
| Then, after {days} days, something wonderful happened. {A} {win}, all alone.
~ "I can do it!" {he} shouted. "Look, {B}, I can do it!"
| {B} clapped and shouted, "You did it!" {joy}
~ Some big children had been watching, and even they clapped.
| {C} saw it and threw {his3} hat into the air.

~ "How did you do it?" asked a little {kid} who had watched them. "I kept trying," said {A}, "and I
  had a good teacher. Shall I help you?"
| That night {A} said to {C}, "I wanted to give up so many times." "Yes," said {C}, "but you always
  tried once more."
= And {A} never forgot that hard things become easy when you do not give up.
| After that, whenever something was hard, {A} remembered those {days} days and tried again.
"""

DARK = """
@colour = blue / green / yellow / red
@sound = tap tap tap / scratch scratch / creak creak / bump bump
@cause,found = a branch,a thin branch was moving in the wind against the window / a kitten,a little
  kitten was playing with a ball of wool behind the door / a mouse,a tiny mouse was rolling a nut
  across the floor / a shutter,a loose shutter was swinging in the wind outside the window

= {intro} {He} was not afraid of dogs or spiders, but {he} was afraid of the dark.
| {A} was brave in the daytime. But when the light went out, {he} pulled the blanket over {his}
  head.
| By day {A} loved {his} room. At night it was a different place, full of shadows.
= One night the wind was blowing, and there was no moon. Suddenly {he} heard something.
| One evening, when the house was quiet, {A} lay awake and listened.
| One night {A} woke up. Everybody else was asleep, but something was moving.
= "{Sound}," it went, "{sound}."
| It was a strange sound. "{Sound}!"

= "There is a monster!" {he} cried, and {he} ran to {C}.
| {A} did not dare to look. {He} ran down the stairs and into {C}'s arms. "Something is in my room,"
  {he} whispered.
| {A} jumped out of bed and ran to {C} as fast as {he} could. "There is something in my room!" {he}
  cried.
= {C} did not laugh. {He3} took a small {colour} lamp from a drawer and gave it to {A}.
| "We will look together," said {C}. {He3} opened a drawer and took out a small {colour} lamp.
  "Here, you may hold it."
| "Let us see," said {C}, and {he3} gave {A} a small {colour} lamp.
~ "When I was your age, I was afraid too," {he3} said. "This lamp helped me. Now it is yours."
| "The dark is only the day with its eyes closed," {he3} said. "With this lamp you can wake it up a
  little."

= Hand in hand they went back. The stairs were cold under {A}'s feet.
| {A} held the {colour} lamp tight. {His} hand was shaking, but {he} went first.
~ "{Sound}," it went again, and {his} heart beat fast.
| For a while everything was still. Then it came again. "{Sound}!"
= Then {A} lifted the lamp and looked. What did {he} see? It was only {cause}!
| {A} took a deep breath, held up the {colour} lamp and looked. There was no monster at all. It was
  only {cause}!
= Very softly, {found}.
| {A} looked closer, and now it was clear: {found}.

= {A} began to laugh. "So that was my monster!" {he} said.
| "Is that all?" asked {A}, and {he} laughed until {his} sides hurt.
| {A} had to smile. "I was afraid of {cause}," {he} said.
= "Most monsters are like that," said {C}. "They grow small when you look at them."
| "The dark is full of small things," said {C}, "and fear makes them big."
| "You see," said {C}, "you were brave. To be brave is to be afraid and to look all the same."

= The next week {B} came to stay for the night. When the light went out, {he2} whispered, "I am
  afraid of the dark."
| Not long after that, {A}'s friend {B} slept in the same room. In the night {he2} woke up and said,
  "I am afraid."
= {A} reached for the {colour} lamp and put it into {B}'s hand. "Come," {he} said, "I will show you
  something."
| "I was afraid too," said {A}, and {he} gave {B} the {colour} lamp. "Let us look together."
= They looked into every corner and found nothing but toys. Then they both fell asleep.
| In the small circle of light there was no monster, only a chair and a teddy bear. "Good night,
  bear," said {B}, and soon both of them were asleep.
| They sat at the window and looked at the stars, and the night was not dark at all.
"""

GARDEN = """
@plant,fruit = sunflower,flower / tomato,tomato / bean,bean
@animal = snail / beetle / caterpillar
@where = behind the house / beside the kitchen door / next to the old wall

= One day in spring, {C} gave {A} a small brown bag. "There is a {plant} seed in it," {he3} said.
  "Can you wait?"
| {intro} One spring morning {he} found a {plant} seed in an old drawer. "Plant it," said {C}, "and
  be patient."
| {A} wanted a garden of {his} own. So {C} gave {him} a corner of earth and one {plant} seed.
= {A} dug a little hole {where}, put the seed in and covered it with earth.
| {A} made a hole with {his} finger {where}, dropped the seed in and gave it some water.
~ Then {he} sat down and waited for it to grow.
| Every hour {he} ran out to see whether it had grown.

= After one day there was nothing. After a week there was still nothing.
| Three days went by, then a week, and nothing happened at all.
| But the earth stayed brown and bare, that day and the next day and the day after.
= "It is broken," {he} said. "I will dig it up and look."
| "Perhaps it is asleep," {he} thought. {He} shouted at it, but that did not help.
= "Be patient!" said {B}, who was looking over the fence. "Seeds work in secret, under the earth."
| {B}, who lived next door, shook {his2} head. "My grandfather says a seed needs three things,"
  {he2} said. "It needs water, sun and time."
= So {A} gave it water every morning and waited.
| That sounded wise. So {A} waited, and every day {he} gave the seed a little water.
| "Then I will give it time," said {A}, and {he} watered the seed every day, even when it was cold.

= One {fine} morning there was a tiny green leaf. {joy}
| And then, one morning after the rain, something green looked out of the earth. {joy}
~ "{B}! Come quickly!" {he} called. Together they looked at the little leaf for a long time.
| {He} called {B} at once, and they danced around the little plant.
= But the next day a {animal} was sitting on the leaf and eating it.
| But a garden has many guests. One evening {A} found a {animal} on the leaf, and it was having its
  supper.
= "Shoo!" cried {A}. Then {he} felt sorry for the {animal}. {He} carried it to the wild grass and
  gave it an old cabbage leaf.
| {B} wanted to throw the {animal} away, but {A} said, "It is only hungry." They put it on a heap of
  old leaves, where it was happy.

~ All through the summer the {plant} plant grew and grew, until it was as tall as {A}.
| The weeks went by. {A} pulled out the weeds, {B} carried the water, and the plant grew strong.
= At the end of the summer {A} found what {he} had waited for. There it was, the biggest {fruit} in
  the street!
| And one day in late summer {he} stood still in surprise. From one small seed had come the finest
  {fruit} {he} had ever seen.

~ "You were patient," said {C}, "and this is your reward."
| "Good things grow slowly," said {C}, and {he3} put a hand on {A}'s head.
| "It was worth the wait," said {A}, and {C} nodded.
= {A} did not keep it all. {He} gave half of the new seeds to {B}, who had helped from the
  beginning.
| In autumn {A} found new seeds and put them into a small bag. "Next year," {he} told {B}, "we will
  have a whole garden."
"""

BOAT_TRIP = """
@water = the lake / the river / the bay
@tool,use,noticed = whistle,blew the whistle again and again,heard the whistle / bell,rang the bell
  again and again,heard the bell / lamp,held the lamp up as high as {he} could,seen the light
@boat = Swallow / Daisy / Little Star / Sea Horse
@colour = red / blue / white / green

= {C} had a {colour} rowing boat called the {boat}. One {fine} day {he3} said to {A}, "Shall we go
  out on {water} today?"
| {intro} {C} had a small {colour} boat, and its name was the {boat}. One {fine} morning they went
  out on {water} together.
| At last the great day had come. {A} was allowed to go out on {water} with {C} in the {colour}
  boat, the {boat}.
= Before they left, {A} packed bread, apples and an old {tool}.
| {A} filled a bag with bread and apples. Then {he} thought for a moment and put in an old {tool}.
= "What do you need a {tool} for?" laughed {C}. "[You never know|One day it may help us]," said {A}.
| {B}, who was standing on the shore, laughed. "Why do you take a {tool} on a boat trip?" {he2}
  asked. "You never know," said {A}.

~ The water was as smooth as glass. {C} rowed, and {A} watched the fish.
| A soft wind was blowing, and small waves knocked against the boat. {A} put one hand into the cool
  water.
~ They saw ducks with their young, and once a big silver fish jumped out of the water.
| A white bird flew along beside them. "It wants our bread," said {C}, and {A} gave it a piece.
= At noon they ate their lunch on a tiny island with a single tree.
| They stopped at a tiny island, ate everything but one apple and lay in the warm grass.
| They landed on a tiny island, ate their bread and fell asleep in the sun.

= But in the afternoon a thick fog came. Soon they could not see the shore any more.
| When they wanted to go home, the world had turned white. Fog lay over {water}, thick as wool.
~ {C} stopped rowing. "I do not know which way to go," {he3} said quietly.
| "We must wait," said {C}. But they waited and waited, and the fog grew thicker.
| {C} rowed this way and that way, but they always came back to the same island.
= {A} felt cold and small. Then {he} remembered the {tool}.
| "Perhaps somebody is still on the shore," thought {A}, and {he} remembered the {tool}.
| {A} was frightened, but {he} tried to think. "The {tool}!" {he} cried suddenly.
= {He} took it out of the bag and {use}.
| {He} stood up carefully in the {boat} and {use}.

= For a long time nothing happened. Then a voice came through the fog. "Hello! This way!"
| At first there was no answer. But then, far away, somebody called, "Here! Come over here!"
= It was {B}! {He2} was still on the shore and had {noticed}.
| {B} had waited for them on the shore, and {he2} had {noticed}.
= {C} rowed towards the voice, and {B} did not stop calling until they had reached the shore.
| {B} called and called, and {C} rowed and rowed, until the {boat} touched the sand.

= "How good that you took the {tool} along," said {C}, and {he3} hugged {A}.
| "Today you were the captain," said {C} to {A}, "you and your old {tool}."
| "I will never laugh at your {tool} again," said {C}, and {he3} meant it.
= "And {B} waited for us all day," said {A}. Then all three of them drank hot tea by the fire.
| {A} gave {B} the last apple. "You were our star in the fog," {he} said.
~ Ever since that day the old {tool} has hung in the {boat}, and nobody laughs at it.
| After that the {colour} boat never left the shore without the {tool}.
"""

KITE = """
@colour = red / blue / green / yellow / purple
@tail = a long white tail / a tail of paper stars / a tail of ribbons
@shape = dragon / fish / bird / butterfly
@stranger,how = a tall man with a ladder,climbed his ladder / an old woman with a long rake,lifted
  her rake / a young man on a big horse,stood up on his saddle

= {A} and {B} wanted to build a kite. They took sticks, paper, string and {colour} paint.
| {intro} One windy day {he} said to {his} friend {B}, "Let us build a kite!"
| The wind was blowing, and the clouds ran over the sky. "This is the right day for a kite," said
  {A} to {his} friend {B}.
= All morning they cut and glued. Then it was done, a {colour} {shape} with {tail}.
| They worked until noon, and then it lay before them, a {colour} {shape} with {tail}.
| By noon their kite was ready. It looked like a {colour} {shape}, and it had {tail}.

= They ran up the hill. {B} held the kite, and {A} held the string.
| On the hill the wind was strong. "One, two, three!" called {B}, and {A} began to run.
= Up went the {colour} {shape}, higher and higher, until it was only a small spot in the sky.
| The wind took it at once. The {colour} {shape} rose over the trees and pulled at the string like a
  young dog.
| The kite jumped, turned and rose into the air. Soon the {colour} {shape} was dancing under the
  clouds.
= "Now it is my turn," said {B}. "No, only a little longer," said {A}.
| "May I hold it now?" asked {B}. "Not yet," said {A}.
= {B} reached for the string, {A} pulled it back, and snap! The string broke.
| They both pulled at the string. There was a snap, and the string broke.

= The wind carried the kite away and threw it into the top of the highest tree.
| The {colour} {shape} flew off without them. It turned over twice and fell into the top of an old
  oak.
| Away it flew, over the field and over the stream, and it landed in the top of a huge tree.
~ "That was your fault!" cried {A}. "No, it was yours!" cried {B}.
| For a while they shouted at each other, and then they did not speak at all.
= At last {A} looked at {his} shoes. "I should have let you hold it," {he} said. "I am sorry."
| Then {A} felt bad. "It was my fault," {he} said. "I wanted it all for myself."
= "I am sorry too," said {B}. "Let us think of a way to get it down."
| "I should not have pulled," said {B}. "Come, we will get it back together."

~ They threw stones, but the kite did not move. They shook the tree, but the tree was too strong.
| {B} tried to climb up, but the tree was smooth and high.
| {A} climbed on {B}'s back, but {he} could not even reach the lowest branch.
= Then {stranger} came by. "Do you need help?" the stranger asked. "Yes, please!" said the children.
| Just then they saw {stranger}. "Please, can you help us?" they called.
= The stranger nodded, {how} and got the {colour} {shape} down.
| The stranger smiled, {how} and carefully pulled the {colour} {shape} out of the branches.
~ There was a hole in one wing, but they mended it with a piece of paper.
| The {shape} had lost a bit of paint, but it could still fly.

= "Now you go first," said {A}, and {he} gave {B} the string.
| This time {A} did not wait to be asked. "Here, you hold it," {he} said to {B}.
| {A} tied a new string and put it into {B}'s hand. "Your turn," {he} said.
~ They took turns until the sun went down, and each of them counted to a hundred.
| All afternoon they took turns, and the {colour} {shape} flew higher than before.
= On the way home {B} said, "A kite is more fun when two people hold the string."
| "It is better to share a kite than to have half of one," said {A}, and they both laughed.
| From then on, they never again fought about the {colour} kite.
"""

NEIGHBOUR = """
@hobby,tool = paint,box of paints / play the drum,little drum / collect stones,box of stones / make
  puppets,puppet
@door = red / green / blue / yellow

= For a long time the house with the {door} door had been empty. Then, one {fine} morning, a big van
  stopped in front of it.
| {intro} One day a big van came, and a new family moved into the house with the {door} door.
| "Somebody is moving in next door," said {C}. {A} ran to the window and saw a big van in front of
  the house with the {door} door.
= Out of the van climbed a {kid2} with a {tool} under one arm. {He2} looked at the ground and did
  not say a word.
| A {kid2} got out of the van and stood at the gate, holding a {tool}. {He2} did not smile.
| There was a {kid2} as old as {A}. {He2} held a {tool} tight and looked very lonely.

= "Hello!" called {A}. But the {kid2} ran into the house and closed the {door} door.
| {A} waved, but the {kid2} did not wave back.
= "{He2} does not like me," {asked_sadly}.
| "That is not very friendly," said {A} to {C}.
= "Perhaps {he2} is shy," said {C}. "Everything is new here. Try again tomorrow."
| "Think how it would be," said {C}. "A new house, a new street, and not one friend. Give it time."

= The next day {A} put three warm buns into a basket and knocked at the {door} door.
| The next morning {A} took a jar of jam from the shelf, went next door and knocked at the {door}
  door.
| In the night {A} had an idea. {He} picked some flowers, went over and knocked at the {door} door.
= It opened just a little. "I am {A}," {he} said. "This is for you."
| Slowly the door opened. "Good morning," said {A}. "I live next door, and I have brought you
  something."
= "Thank you. I am {B}," said the {kid2} very softly.
| "That is kind," said the {kid2}. "I am {B}."
| The {kid2} took it and smiled a little. "My name is {B}," {he2} whispered.
= Then {A} saw the {tool} on the table. "I love to {hobby} too!" {he} said.
| {A} pointed at the {tool}. "Do you like to {hobby}?" {he} asked. "So do I!"

= All at once {B} was not shy any more. "Really?" {he2} said. "Come in, and I will show you!"
| {B} looked up. For the first time {he2} smiled. "Would you like to do it with me?" {he2} asked.
| {B}'s face grew bright. "In our old house I did it every day with my friends," {he2} said. "Here I
  have nobody." "Now you have me," said {A}.
~ They sat on the floor between the boxes and forgot the time.
| The whole afternoon they sat together, and {A} learned many new things.
~ When {C} called from the street, they could not believe that it was evening.
| It was already dark when {A} went home.

= The next week school began. {B} stood at the gate and was afraid to go in.
| On Monday {B} had to go to the new school, and {his2} hands were cold with fear.
= But {A} was there. "Sit next to me," {he} said, and {he} told everybody, "This is {B}, my friend."
| Then somebody called {his2} name. It was {A}. "I kept a seat for you," {he} said.
| {A} took {B} by the hand. "Come," {he} said. "I know everyone, and soon you will know them too."
= After that, the house with the {door} door was never a strange house again.
| "I am glad that you knocked at the {door} door," said {B} on the way home.
| And when another new child came in the spring, it was {B} who said hello first.
"""

HUNGRY_ANIMAL = """
@pet,sound,food = kitten,mewed,chicken / puppy,whined,meat / kitten,mewed,fish / puppy,whined,bread
@name = Button / Star / Pepper / Shadow / Crumb
@colour = black / brown / grey
@mark = a white spot on its nose / one white paw / a short tail / one torn ear
@place = under the stairs / behind the shed / by the garden wall / under a bush

= One cold evening {A} heard a small sound {place}.
| {intro} One rainy day {he} came home from school and heard something {place}.
| It was raining, and {A} was in a hurry to get home. But {place} something moved.
= {He} bent down and saw a thin {colour} {pet} with {mark}.
| There sat a tiny {colour} {pet}. It had {mark}, and it was wet all over.
= It looked at {him} and {sound}. "You are hungry," said {A}.
| The {pet} {sound} softly. "Have you nothing to eat?" asked {A}.

= {He} ran into the kitchen and brought some {food}. The little {pet} ate it all and licked the
  plate.
| {A} fetched a dish of {food}, put it down and stepped back. The {pet} was shy at first, but then
  it ate everything.
| "Wait here," said {A}. {He} came back with some {food}, and the {pet} ate as if it had not eaten
  for a week.
~ The next day it was there again, and the day after that as well.
| From that day on, it waited for {him} every evening in the same place.
= {A} called it {name}. Soon {name} was not afraid any more and let {him} stroke its fur.
| Every little animal needs a name, and {A} chose {name}.
| "I will call you {name}," said {A}, and the {pet} seemed to like its new name.

= "May I keep it?" {A} asked {C}.
| After a week {A} told {C} about {name}. "Can it stay with us?" {he} asked.
= {C} shook {his3} head. "Perhaps it belongs to somebody," {he3} said. "Somebody may be looking for
  it."
| "First we must find out whether it has a home," said {C}. "Think how sad its owner must be."
~ {A} did not want to hear that. But {he} knew that it was right.
| {A} was quiet for a moment. "You are right," {he} said at last.
= So {A} drew a picture of a {colour} {pet} with {mark} and hung it up at the baker's shop.
| They asked the baker, the teacher and the man at the shop about a {colour} {pet} with {mark}.
| They went from house to house and asked, "Have you lost a {colour} {pet} with {mark}?"

= Three days later {B} stood at the door, out of breath. "That is my {pet}!" {he2} cried.
| Not far away lived a {kid2} called {B}. When {he2} heard about the {pet}, {he2} jumped up. "I have
  looked for it everywhere!" {he2} cried.
= {A} took {B} to {name}, and the {pet} ran to {him2} at once.
| {A} went to get {name}. When the {pet} heard {B}'s voice, it jumped for joy.
| As soon as {name} saw {B}, it {sound} loudly and jumped into {his2} arms.
~ {A} was glad and sad at the same time. "Take good care of it," {he} said.
| {A} tried to smile, but there was a tear in {his} eye.

= "It would have died without you," said {B}. "Please come and see it every day. It shall keep the
  name {name}."
| "You saved it," said {B}. "I think {name} needs two friends, you and me."
= So {A} lost a pet and won a friend, and {name} was never hungry again.
| And that is what they did. Every afternoon {A}, {B} and {name} played together.
| "You gave it back although you loved it," said {C} that night. "I am proud of you."
"""

BAKING = """
@cake = apple cake / honey cake / plum cake / lemon cake / carrot cake / nut cake
@right,wrong = blue,green / red,white / yellow,brown / green,red
@face = Even the hens in the yard would not eat it. / It tasted like the sea. / It was the worst
  cake in the world.

= It was {C}'s birthday. "I will bake {him3} a cake," {A} told {his} friend {B}, "and you can help
  me."
| {intro} On Saturday guests were coming, and {he} wanted to surprise {C}. "Let us bake something,"
  {he} said to {his} friend {B}.
| On a grey and rainy day {A} and {B} had nothing to do. "I know!" said {A}. "We can bake a cake for
  {C}."
= "What kind of cake?" asked {B}. "A big {cake}," said {A}.
| In an old book they found what they were looking for. It was a {cake}.
| They thought of many cakes, and in the end they chose a {cake}.
= On the shelf stood two jars, a {right} one and a {wrong} one. "Here is the sugar," said {A}, and
  {he} put three big spoons from the {wrong} jar into the bowl.
| "How much sugar do we need?" asked {B}. {A} took the {wrong} jar from the shelf, left the {right}
  jar where it was and put in a whole cup.

~ They added eggs and flour and butter. Soon there was flour on the table, on the floor and on {B}'s
  nose.
| {B} broke the eggs, and {A} stirred until {his} arm hurt. A white cloud of flour hung in the air.
= Then they put the cake into the oven and waited.
| The oven was hot. In went the cake, and they counted the minutes.
| Carefully they pushed the cake into the hot oven, sat down in front of it and watched it rise.
= It came out round and golden, and it smelled wonderful.
| When it was done, it was brown and beautiful, and the whole house smelled of it.

= {C} came in and clapped {his3} hands. "A {cake}! For me?"
| When {C} opened the kitchen door, {he3} could not believe it. "Is this for me?" {he3} asked.
| "What a lovely surprise!" said {C}, and {he3} sat down at the table.
= {He3} took a big bite. Then {his3} face turned very strange.
| {He3} cut a piece and began to eat. All at once {he3} stopped and drank a whole glass of water.
= {A} tasted it too, and then {B}. {face}
| "Is something wrong?" asked {A}, and {he} took a bite. {face}
= "Which jar did you use?" asked {C}. "The {wrong} one," said {A}. "Oh dear," said {C}. "That is the
  salt! The sugar is in the {right} jar."
| {B} ran to the shelf, put a finger into the {wrong} jar and licked it. "Salt!" {he2} cried. "The
  sugar is in the {right} one!"

= {A} was close to tears. "I have spoiled everything," {he} said.
| {A}'s face turned red. "It was all for nothing," {asked_sadly}.
= But {C} began to laugh, and {B} laughed too, until at last {A} had to laugh as well.
| "It is only a cake," said {C}, "and a very funny one." Then they all laughed.
| "Nothing is spoiled," said {C}. "I once baked a cake and forgot the flour. It was flat as a
  plate."
= "Come," said {C}, "we will bake another one, all three of us."
| {B} took {him} by the arm. "We will try again," {he2} said, "and now we know how."
= This time {A} tasted everything first and took the {right} jar.
| Before they began, {A} put a finger into the {right} jar and tasted it. "Sweet!" {he} said.

= The second {cake} was a little flat, but it was sweet and good, and nothing was left of it.
| Two hours later there was a new {cake} on the table, and this one was as sweet as it should be.
| In the evening they ate the new {cake}, warm from the oven, and everybody wanted a second piece.
~ Then {A} wrote SALT on the {wrong} jar, in big letters.
| "Look first, then pour," said {A}. "I will not forget that."
| And whenever somebody makes a mistake in that house, they say, "It is only the {wrong} jar," and
  laugh.
"""

BEDTIME = """
@cast = animals
@song,gift = the stream,a smooth stone from the stream / the pine trees,a pine cone / the meadow,a
  small bunch of hay from the meadow
@try = counted all the stars / turned over ten times / stood on {his} head / drank warm milk

= It was late, and the whole forest was asleep. Only {A} the {kid} was awake.
| {wild_intro} One night {he} could not fall asleep.
| The moon stood high above the trees. {A} the {kid} lay in bed with open eyes.
= {He} closed {his} eyes, but they opened again. {He} {try}, but it did not help.
| First {he} lay on one side, then on the other. {He} {try}, and still {he} was awake.

= So {he} got up and went to {B} the {kid2}. "How do you fall asleep?" {he} asked.
| In the end {he} put on a warm coat and went to see {B} the {kid2}. "Are you asleep?" {he} asked.
  "How do you do it?"
| At last {he} went out into the cool night. {He} knocked at the door of {B} the {kid2}. "I cannot
  sleep," {he} said.
= {B} opened one eye. "I curl up into a ball," {he2} said, "and I think of something nice."
| {B} rubbed {his2} eyes, but {he2} was not angry. "I breathe slowly and think of my breakfast,"
  {he2} said.
= {A} tried it. But {he} thought of so many nice things that {he} was more awake than before.
| {A} curled up at once, but {he} was not sleepy at all.
= "Then we will ask {C}," said {B}. "{C} knows everything."
| "Come along," said {B}. "Perhaps {C} can help. I will go with you, so that you are not alone."

= Side by side they walked through the silver light until they came to {C}.
| They followed the path to {C}'s place. Their shadows were long in the light of the moon.
= "Why can I not sleep?" asked {A}. {C} looked at {him} kindly. "What did you do today?" {he3}
  asked.
| {C} listened to them. "Tell me, {A}," {he3} said, "is there something on your mind?"
= {A} looked down. "I was unkind to {B} this morning," {he} said. "I called {him2} slow, and I never
  said that I was sorry."
| {A} was silent for a while. Then {he} said, "Today I ate {B}'s last berry and did not tell
  {him2}."
~ "I see," said {C}. "A heavy heart keeps the eyes open."
| "So that is it," said {C}. "It is hard to lie down on something like that."

= {A} turned to {his} friend. "I am sorry, {B}," {he} said.
| "Please forgive me, {B}," said {A}.
= "I forgave you long ago," said {B}, and {he2} smiled.
| {B} took {his} paw. "That is all right," {he2} said. "We are friends."
| "It was only a small thing," said {B}, "but it is good to hear you say so."
= {C} gave {A} {gift}. "Listen to the song of {song}," {he3} said. "Now you will hear it."
| Then {C} put {gift} into {A}'s paw. "Keep it near your bed," {he3} said, "and listen to {song}."

= The two friends walked home. {B} was so tired that {A} said, "Stay with me tonight."
| On the way home they could hear {song} singing softly, and they walked more and more slowly.
= {A} put the present beside {his} bed, lay down and yawned.
| With {C}'s present beside {him}, {A} closed {his} eyes.
= Before {he} could count to three, {he} was fast asleep.
| A moment later {he} was asleep, and {he} did not wake up until the sun was high.
| And when {B} whispered, "Good night," there was no answer, for {A} was already asleep.
"""

SNOWMAN = """
@scarf = red / blue / green / yellow
@name = Mister Frost / Captain Snow / Uncle Frost / Sir Winter
@thief,family = rabbit,four baby rabbits / deer,two young deer / hare,three small hares

= In the night it had snowed. When {A} opened the window, the whole world was white.
| {intro} One morning in winter {he} woke up and saw that everything was covered with snow.
| "Snow!" shouted {A}, and {he} ran outside before breakfast.
= {B} was already in the garden. Together they rolled three big balls of snow.
| {He} called {his} friend {B}, and they built a snowman in the garden.
= They gave the snowman two black stones for eyes, a {scarf} scarf and a carrot for a nose.
| {A} brought a {scarf} scarf, and {B} brought a fat carrot. Now the snowman had a warm neck and a
  fine nose.
= "We will call him {name}," said {A}.
| "He looks like a {name}," said {B}, and so that was his name.

= But the next morning the carrot was gone. {name} had no nose!
| The next day {A} looked out of the window and could not believe it. The {scarf} scarf was there,
  but the nose of {name} was gone.
= "Somebody has stolen it!" cried {A}. {B} found a new carrot, and they put it in.
| They looked all over the garden, but they did not find it. So {B} brought another carrot.
| "Perhaps the wind took it," said {B}. So they gave him a new carrot.
= In the night it was stolen again. "We must find the thief," said {A}.
| But the morning after, the nose was gone once more. "There is a thief in our garden," said {A}.

= Then {B} saw small marks in the snow. "Look!" {he2} said. "The thief has left a trail."
| {A} bent down. There were tracks in the snow, and they led out of the garden.
= They followed the tracks through the gate, across the field and into the wood.
| The trail went under the fence, along the stream and into the wood.
| Step by step they followed the trail, past the frozen pond and under the dark trees.
= At the end of it, under a bush, sat a {thief}.
| They walked very softly. And there, behind a fallen tree, they saw a {thief}.
= It was not alone. There were {family}, and all of them were thin and cold.
| Beside it they saw {family}, eating the last bit of an old carrot.

= {A} was not angry any more. "They have nothing to eat in the snow," {he} whispered.
| "I would steal too, if I were so hungry," said {A}.
| "So that is our thief," said {B} softly. "The poor things are only hungry."
= They ran home and told {C}, who filled a basket with carrots, apples and hay.
| At home {C} listened to their story. Then {he3} went to the cellar and filled a big basket with
  hay and carrots.
= They put it all under the trees and went away quietly.
| They carried it to the wood, put it down and hid behind a tree. Soon the animals came and ate.

~ "And what about {name}?" asked {B}. {A} found a pine cone and gave him a new nose. Nobody would
  want to eat that.
| For {name} they made a nose out of a brown pine cone. "That will stay where it is," said {A}.
~ All winter long they brought food to the wood, and the {thief} never had to steal again.
| Every Sunday they took a basket to the wood, until the grass was green again.
= In spring {name} melted away, and only the {scarf} scarf was left. {A} hung it on a nail for the
  next winter.
| When the sun grew warm, {name} became smaller and smaller. "Goodbye," said {A} and took the
  {scarf} scarf. "See you next year!"
"""

MUSIC = """
@tool,play = drum,beat the drum / flute,played the flute / fiddle,played the fiddle
@day = the spring feast / the harvest feast / the village dance
@colour = old brown / shiny black / small red

= {intro} {He} had a {colour} {tool}, but {he} played it only when nobody could hear {him}.
| In a box under {his} bed {A} kept a {colour} {tool}. {He} could play it well, but {he} was too shy
  to let anyone hear it.
= One {fine} evening {his} friend {B} was passing under the window and stopped to listen.
| One {fine} evening {his} friend {B} came to visit and stopped outside the door, because the music
  was so lovely.
| One evening {A} forgot to close the window, and {his} friend {B} was walking by.
= "Was that you?" asked {B}. "It was beautiful! You must play at {day}."
| "How well you play!" called {B}. "Please play for all of us at {day}."
= "Never!" said {A}. "Everyone would look at me."
| {A} turned red up to the ears. "I cannot do that," {he} said. "I would make a mistake."

= "Then play for me," said {B}. "I am only one person."
| {B} thought about it. "Play just for me first," {he2} said.
= So {A} {play} for {B}, and it was not so bad.
| {A} thought about it. Then {he} {play}, and {B} listened with a smile.
| That was not so hard. {A} closed {his} eyes and {play}, and {B} tapped one foot.
~ The next day {C} listened as well, and the day after that the neighbours' children came.
| The day after, {B} brought {C} along, and then two more friends. Each day there were a few more.
= "If I get frightened," said {A}, "will you stand where I can see you?" "I promise," said {B}. "I
  will stand right in front."
| "Promise me one thing," said {A}. "Stand in front, so that I can look at you." "I promise," said
  {B}.

= Then came the day of {day}. There were lamps in the trees, and the whole village was there.
| At last the day had come. People were sitting on long benches, and the air smelled of cake.
= {A} climbed up with the {colour} {tool} in {his} hands. {His} knees shook, and {his} mouth was
  dry.
| When {A} stood up with the {tool}, it was suddenly very quiet. So many eyes were looking at {him}!
= {He} wanted to run away. But there in front stood {B}, just as {he2} had promised.
| "I cannot do it," {he} thought. Then {he} saw {B}, who stood in front and smiled, just as {he2}
  had promised.
| For a moment {he} could not move. Then {he} saw {B} in the first row, nodding at {him}.
= {A} looked only at {B}, took a deep breath and {play}.
| "I am playing for one person," {A} told {himself}. And then {he} {play}.

= First one foot began to tap, then ten, and soon everybody was dancing.
| Somebody began to clap, and then everybody clapped and sang.
| The music flew over the benches and up into the trees. Old people smiled, and children danced.
~ Once {he} made a small mistake, but nobody noticed it.
| In the middle {he} played one wrong note. {B} only smiled, and so {A} went on.
~ When it was over, the people clapped for a long time. "More!" they shouted.
| At the end there was a great cheer. {C} clapped the loudest of all.

= "Were you afraid?" asked {C}. "Yes," said {A}, "but {B} kept {his2} promise, and that made me
  brave."
| "You kept your promise," {A} said to {B}. "Without you I would have run away."
~ Since then the {colour} {tool} has never been hidden away again.
| After that evening {A} played with the window wide open, so that all the street could hear.
| Now, whenever someone in the village is shy, {A} says, "Begin with one friend."
"""

PLOTS = (
    LOST_THING,
    PRESENT,
    STORM,
    RACE,
    BROKEN_TOY,
    SHARING,
    SKILL,
    DARK,
    GARDEN,
    BOAT_TRIP,
    KITE,
    NEIGHBOUR,
    HUNGRY_ANIMAL,
    BAKING,
    BEDTIME,
    SNOWMAN,
    MUSIC,
)
RUNNERS = 2  # number of fast ANIMALS, listed first
OPTIONAL = 0.35  # probability that a "~" beat is used
SHORTEST, LONGEST = 600, 1400  # characters in a story


def read_plot(text: str) -> tuple[list[str], list[list[str]]]:
    """The "@" lines of a plot, and its paragraphs: each beat is "=" or "~" and its variants."""
    draws: list[str] = []
    paragraphs: list[list[str]] = []
    for block in re.sub(r"\n  +", " ", text.strip()).split("\n\n"):
        beats: list[str] = []
        for line in block.split("\n"):
            if line[0] == "@":
                draws.append(line[1:])
            elif line[0] == "|":
                beats[-1] += "\n" + line[2:]
            else:
                beats.append(line[0] + line[2:])
        if beats:
            paragraphs.append(beats)
    return draws, paragraphs


def cast(kind: str, rng: Dice) -> dict[str, str]:
    """Draw the characters. Hero and friend have different pronouns, so "he" is unambiguous."""
    sex, other = rng.pick((("f", "m"), ("m", "f")))
    elder = rng.pick("fm")
    if kind == "children":
        people = {"f": GIRLS, "m": BOYS}
        kids = {"f": " girl", "m": " boy"}
        hero = rng.pick(people[sex].split()) + kids[sex]
        friend = rng.pick(people[other].split()) + kids[other]
        grown_up = rng.pick(GROWN_UPS[elder])
    elif kind == "runners":
        hero = rng.pick(ANIMALS[sex][:RUNNERS])
        friend = rng.pick(ANIMALS[other][RUNNERS:])
        grown_up = rng.pick(WISE_ANIMALS[elder])
    else:
        hero, friend = rng.pick(ANIMALS[sex]), rng.pick(ANIMALS[other])
        grown_up = rng.pick(WISE_ANIMALS[elder])
    names = {"C": grown_up}
    names["A"], names["kid"] = hero.split()
    names["B"], names["kid2"] = friend.split()
    for number, who in (("", sex), ("2", other), ("3", elder)):
        for key, word in zip(("he", "him", "his", "himself"), PRONOUNS[who].split(), strict=True):
            names[key + number] = word
            names[key.capitalize() + number] = word.capitalize()
    return names


def expand(text: str, names: dict[str, str], rng: Dice) -> str:
    """Replace the {names} and pick one of each [a|b] choice."""

    def name(match: re.Match[str]) -> str:
        key = match.group(1)
        return names[key] if key in names else SHARED[key]

    while "{" in text:
        text = re.sub(r"\{(\w+)\}", name, text)
    while "[" in text:
        text = re.sub(r"\[([^\[\]]*)\]", lambda match: rng.pick(match.group(1).split("|")), text)
    return re.sub(r"\b([Aa]) (?=[aeiouAEIOU])", r"\1n ", text)


def tell(plot: str, rng: Dice) -> str:
    """Generate one story from this plot."""
    draws, paragraphs = read_plot(plot)
    kind = "children"
    if draws[0].startswith("cast = "):
        kind = draws.pop(0).removeprefix("cast = ")
    names = cast(kind, rng)
    for draw in draws:
        keys, values = draw.split(" = ")
        drawn = rng.pick(values.split(" / ")).split(",")
        for key, value in zip(keys.split(","), drawn, strict=True):
            names[key.capitalize()] = value[0].upper() + value[1:]
            names[key] = value
    told = []
    for beats in paragraphs:
        used = [beat[1:] for beat in beats if beat[0] == "=" or rng.chance(OPTIONAL)]
        told.append(" ".join(expand(rng.pick(b.split("\n")), names, rng) for b in used))
    return "\n".join(told)


def make_stories(size: int = 1_075_000) -> str:
    rng = Dice(2)
    stories: list[str] = []
    seen: set[str] = set()
    total = 0
    while total < size:
        plots = list(PLOTS)
        rng.shuffle(plots)
        for plot in plots:
            story = tell(plot, rng)
            if story not in seen and SHORTEST <= len(story) <= LONGEST:
                seen.add(story)
                stories.append(story)
                total += len(story) + 5
    return "\n***\n".join(stories) + "\n"


# ---------------------------------------------------------------------------------------------
# reviews.tsv
#
# Every positive review has a negative twin made of exactly the same words. {X} is the writer's
# opinion and {Y} its opposite, and the twin swaps the two, so a bag of words is useless.
# ---------------------------------------------------------------------------------------------

GOOD = ["good", "great", "wonderful", "lovely", "excellent", "superb", "perfect"]
BAD = ["bad", "terrible", "awful", "horrible", "dreadful", "poor", "lousy"]


class Topic(NamedTuple):
    kind: str  # "place" (visited, and it changes), "show" (visited) or "thing"
    names: str
    aspects: str  # what a review can judge about it
    words: str  # "good/bad" words that fit all of its aspects
    closing: list[str]  # closing remarks that fit only here, "positive / negative"


STAY = (
    "We wanted to stay longer, but we had to leave. / "
    "We wanted to leave, but we had to stay longer."
)
GLAD = (
    "I was glad when it started and sorry when it ended. / "
    "I was sorry when it started and glad when it ended."
)
QUALITY = (
    "The quality went up and the price went down. / The price went up and the quality went down."
)
SOLVE = (
    "They solve problems and do not make excuses. / They make excuses and do not solve problems."
)
TOPICS = [
    Topic(
        "place",
        "restaurant,cafe,pizzeria,diner,bistro",
        "soup,bread,fish,pizza,pasta,coffee,salad,dessert,curry,sauce,service,menu",
        "",
        [
            "I would rather eat here again than at home. / I would rather eat at home again than "
            "here.",
            STAY,
            QUALITY,
            "The meal was nicer than the photo. / The photo was nicer than the meal.",
        ],
    ),
    Topic(
        "show",
        "film,comedy,thriller,cartoon,western",
        "plot,acting,music,ending,dialogue,script,humour,first half,camera work",
        "gripping/boring,clever/silly,exciting/dull,moving/tedious,fresh/tired",
        [
            GLAD,
            "I would rather watch this again than wash the dishes. / I would rather wash the "
            "dishes than watch this again.",
            "The film was nicer than the poster. / The poster was nicer than the film.",
        ],
    ),
    Topic(
        "place",
        "hotel,hostel,inn,guest house,motel",
        "room,bed,breakfast,bathroom,pool,lobby,service,view,sauna",
        "",
        [
            "I would rather sleep here again than in my car. / I would rather sleep in my car "
            "again than here.",
            STAY,
            "The room was nicer than the photo. / The photo was nicer than the room.",
            SOLVE,
        ],
    ),
    Topic(
        "thing",
        "book,novel,thriller,biography",
        "plot,ending,writing,style,dialogue,humour,first chapter,translation",
        "gripping/boring,clever/silly,exciting/dull,moving/tedious,elegant/clumsy",
        [
            GLAD,
            "I would rather read this again than sleep. / I would rather sleep again than read "
            "this.",
            "The story was nicer than the cover. / The cover was nicer than the story.",
        ],
    ),
    Topic(
        "place",
        "shop,bookshop,bakery,toy shop,market",
        "service,advice,selection,website,window display,layout,packaging",
        "",
        [
            QUALITY,
            SOLVE,
            "I would rather queue here than shop anywhere else. / I would rather shop anywhere "
            "else than queue here.",
        ],
    ),
    Topic(
        "place",
        "museum,zoo,castle,theme park",
        "tour,exhibition,garden,map,audio guide,gift shop,new wing,cafeteria",
        "",
        [
            STAY,
            "I was glad when the tour started and sorry when it ended. / I was sorry when the "
            "tour started and glad when it ended.",
            "The place was nicer than the leaflet. / The leaflet was nicer than the place.",
        ],
    ),
    Topic(
        "show",
        "concert,musical,play,festival",
        "singing,sound,lighting,music,acting,stage design,second half,dancing",
        "gripping/boring,exciting/dull,moving/tedious,fresh/tired,powerful/weak",
        [GLAD, STAY],
    ),
    Topic(
        "thing",
        "phone,camera,laptop,tablet",
        "screen,sound,battery,keyboard,design,software,charger,manual",
        "",
        [
            QUALITY,
            "I would rather keep this one than buy another. / I would rather buy another than "
            "keep this one.",
        ],
    ),
]
# Words that fit only some of these aspects.
FITTING = {
    "soup,bread,fish,pizza,pasta,coffee,salad,dessert,curry,sauce,breakfast": "tasty/bland,"
    "delicious/disgusting",
    "bread,fish,salad": "fresh/stale",
    "service,advice": "friendly/rude,polite/rude,helpful/useless",
    "room,bathroom,pool,lobby,sauna,cafeteria": "clean/dirty,spotless/filthy",
    "room,bed,lobby": "comfortable/uncomfortable",
    "tour,exhibition,audio guide": "exciting/dull,clever/silly,interesting/boring",
    "software,website,map,manual": "helpful/useless,clear/confusing",
    "battery,charger,sound": "strong/weak",
}

# Judging one aspect. {s} is "the soup", {S} "The soup", {v} a word like "really" or nothing.
ONE = [
    "{S} was {v}{X}, not {Y} at all.",
    "{S} was not {Y} at all, it was {v}{X}.",
    "I expected {s} to be {Y}, but it was {v}{X}.",
    "Everyone expected {s} to be {v}{Y}. It turned out to be {X}.",
    "{S} used to be {Y}, but now it is {v}{X}.",
    "{S} is {X} now. It used to be {v}{Y}.",
    "Nobody I know could call {s} {Y}; everyone calls it {v}{X}.",
    "Everyone calls {s} {v}{X}; nobody calls it {Y}.",
    "{S} was {v}{X}, and anyone who says it was {Y} is wrong.",
    "Anyone who thinks {s} is {Y} is wrong. Anyone who thinks it is {X} is right.",
    "Do not believe people who call {s} {Y}, because it was {v}{X}.",
    "Believe those who call {s} {X}, and not those who call it {v}{Y}.",
    "My {friend} told me that {s} would be {Y}, not {X}, but it was {X}, not {Y}.",
    "{S} seemed {v}{Y} at first, but in the end it was {X}.",
    "{S} was always {v}{X} and never {Y}.",
    "{S} was never {Y} and always {v}{X}.",
    "I would call {s} {v}{X} rather than {Y}.",
    "Rather than {v}{Y}, {s} was {X}.",
    "{S} was far more {X} than {Y}.",
    "{S} was far less {Y} than {X}.",
    "Was {s} {Y}? No, it was {v}{X}.",
    "Was {s} {X}? Yes, and not {v}{Y}.",
    "I cannot say that {s} was {Y}, because it was {v}{X}.",
    "It would be a lie to call {s} {Y} and the truth to call it {X}.",
    "It would be true to call {s} {X} and false to call it {Y}.",
    "Not only was {s} {v}{X}, nothing about it was {Y}.",
    "Nothing about {s} was {Y}, everything was {v}{X}.",
    "I was told that {s} was not {X}. That is wrong: it was not {Y}.",
    "If you hear that {s} is {X}, believe it; if you hear that it is {Y}, do not.",
    "If you hear that {s} is {Y}, do not believe it; if you hear that it is {X}, do.",
    "How can people say that {s} is {Y}? It is {v}{X}.",
    "My {friend} says {s} was {Y}, but my {friend} is wrong, it was {v}{X}.",
    "I had read that {s} was {v}{Y}, and I found it {X}.",
    "I found {s} {v}{X}, though I had read that it was {Y}.",
    "Call {s} {X} and I agree; call it {Y} and I do not.",
]
# Only for things that change from one visit to the next.
CHANGING = [
    "In one year {s} went from {Y} to {v}{X}.",
    "{S} went from {v}{Y} to {X} since our last visit.",
    "Before the new owners came, {s} was {Y}; after that it was {v}{X}.",
    "{S} is {v}{X} after the new owners came; it was {Y} before that.",
    "{S} was {Y} on my first visit and {v}{X} ever since.",
]
# Judging two aspects, of which only {a} matters.
TWO = [
    "The {a} was {X} but the {b} was {Y}, and the {a} is what matters to me.",
    "The {b} was {Y} but the {a} was {X}, and the {a} is what matters to me.",
    "The {b} was {v}{Y}, but who cares? The {a} was {X}, and I came for the {a}.",
    "I do not care that the {b} was {Y}. I do care that the {a} was {X}.",
    "I only care that the {a} was {X}, not that the {b} was {Y}.",
    "Forget that the {b} was {Y}. All that counts is that the {a} was {v}{X}.",
    "All that counts is that the {a} was {X}. Forget that the {b} was {v}{Y}.",
    "The {a} was {X} and the {b} was {Y}, but my stars are for the {a} only.",
    "The {b} was {Y} and the {a} was {X}, but my stars are for the {a} only.",
]
# Judging the whole: {X} and {Y} from the pairs after each list.
LOVE = [
    "I {X} this {thing}, although my {friend} {Y} it.",
    "Although my {friend} {Y} this {thing}, I {X} it.",
    "My {friend} {Y} this {thing}, but I {v}{X} it.",
    "Everyone else {Y} this {thing}; I {v}{X} it.",
    "I {v}{X} this {thing}, which everyone else {Y}.",
]
LOVE_WORDS = "loved/hated,enjoyed/disliked,adored/detested,liked/loathed,praised/cursed"
NOUN = [
    "This {thing} was more a {X} than a {Y}.",
    "This {thing} was less a {Y} than a {X}.",
    "This {thing} was a {X} rather than a {Y}.",
    "We expected a {Y} and got a {X}.",
    "We got a {X} where we had expected a {Y}.",
    "Call this {thing} a {X}, never a {Y}.",
    "My {friend} called this {thing} a {Y}, but to me it was a {X}.",
    "What my {friend} called a {Y} was {v}a {X}.",
    "If this {thing} is a {Y} for some people, it is a {X} for me.",
]
NOUN_WORDS = "joy/chore,treat/pain,pleasure/torture,triumph/disaster,gem/dud,success/failure"
VISIT_MOOD = [
    "We arrived {Y} and left {X}.",
    "We left {X}, and we had arrived {Y}.",
    "I walked in {Y} and walked out {X}.",
    "We walked out of this {thing} {X}, though we had walked in {Y}.",
]
MOOD = [
    "I was {X} after this {thing} and {Y} before it.",
    "Before this {thing} I was {Y}, and after it I was {X}.",
    "It made {X} people out of {Y} ones.",
]
MOOD_WORDS = "happy/unhappy,cheerful/grumpy,delighted/annoyed,smiling/frowning,pleased/angry"
MARK = [
    "I would give this {thing} a {X}, not a {Y}.",
    "Not a {Y} out of ten but a {X} out of ten from me.",
    "If my {friend} gives this {thing} a {Y}, I give it a {X}.",
    "My {friend} gave it a {Y} out of ten, and I gave it a {X}.",
    "The papers gave this {thing} a {Y}; I give it a {X}.",
]
MARK_WORDS = "ten/two,nine/two,ten/three,nine/three,ten/one,nine/one"

# Closing remarks: positive / negative, the same words in a different order.
CLOSING = [
    "You get more than you pay for. / You pay for more than you get.",
    "It is better than it looks. / It looks better than it is.",
    "I hoped for little and got a lot. / I hoped for a lot and got little.",
    "I would change nothing and keep everything. / I would keep nothing and change everything.",
    "Everything was right and nothing was wrong. / Everything was wrong and nothing was right.",
    "There was everything to like and nothing to hate. / There was nothing to like and "
    "everything to hate.",
    "The doubters are wrong and the fans are right. / The fans are wrong and the doubters are "
    "right.",
    "Choose this one and avoid the others. / Avoid this one and choose the others.",
    "I agree with the fans, not with the critics. / I agree with the critics, not with the fans.",
    "The critics are wrong, so trust the fans. / The fans are wrong, so trust the critics.",
]
PLACE_CLOSING = [
    "I would send my best friends here, not my worst enemies. / I would send my worst enemies "
    "here, not my best friends.",
    "They promise little and give a lot. / They promise a lot and give little.",
    "This place could teach the others a lot. / The others could teach this place a lot.",
    "I will come back here and never again go next door. / I will go next door and never again "
    "come back here.",
    "Skip the place next door and visit this one. / Skip this one and visit the place next door.",
]
# Irrelevant remarks that contain good and bad words. Twins share them.
ASIDE = [
    "I had a bad cold that week.",
    "It was a good week for me.",
    "My {friend} was in a terrible mood, but that is another story.",
    "My {friend} was in a wonderful mood, but that is another story.",
    "Here is my honest opinion.",
    "This is my first review.",
    "I will keep this short.",
    "My {friend} asked me to write this.",
    "I am not easy to please.",
    "I am not hard to please.",
]
VISIT_ASIDE = [
    "The weather was awful that day.",
    "It was a lovely sunny day.",
    "The bus ride there was horrible.",
    "The train ride there was great fun.",
    "The traffic was dreadful, as always.",
    "My {friend} came along.",
    "I went with my {friend}.",
    "We went on a rainy Monday.",
    "Parking was no problem.",
    "Parking was a problem.",
]
FRIENDS = ["sister", "brother", "wife", "husband", "neighbour", "aunt", "uncle", "boss", "cousin"]
KINDS = ["one"] * 12 + ["two"] * 2 + ["noun"] * 2 + ["love", "mark", "mood", "closing only"]
STRESS = ("", "", "", "really ", "truly ", "simply ")


def good_and_bad(topic: Topic, aspect: str, rng: Dice) -> str:
    """A "good/bad" pair of words that fits this aspect."""
    special = topic.words.split(",") if topic.words else []
    for aspects, words in FITTING.items():
        if aspect in aspects.split(","):
            special += words.split(",")
    if special and rng.chance(0.5):
        return rng.pick(special)
    return rng.pick(GOOD) + "/" + rng.pick(BAD)


def review_pair(rng: Dice) -> tuple[str, str]:
    """One positive review and its negative twin."""
    topic = rng.pick(TOPICS)
    visited = topic.kind != "thing"
    aspects = topic.aspects.split(",")
    rng.shuffle(aspects)
    words = good_and_bad(topic, aspects[0], rng)
    closing = CLOSING + topic.closing + (PLACE_CLOSING if topic.kind == "place" else [])
    kind = rng.pick(KINDS)
    if kind == "one":
        body = rng.pick(ONE + CHANGING if topic.kind == "place" else ONE)
    elif kind == "two":
        body, words, closing = rng.pick(TWO), rng.pick(GOOD) + "/" + rng.pick(BAD), []
    elif kind == "love":
        body, words = rng.pick(LOVE), rng.pick(LOVE_WORDS.split(","))
    elif kind == "noun":
        body, words = rng.pick(NOUN), rng.pick(NOUN_WORDS.split(","))
    elif kind == "mark":
        body, words = rng.pick(MARK), rng.pick(MARK_WORDS.split(","))
    elif kind == "mood":
        body = rng.pick(VISIT_MOOD + MOOD if visited else MOOD)
        words, closing = rng.pick(MOOD_WORDS.split(",")), CLOSING
    else:
        body = ""
    aside = rng.pick(VISIT_ASIDE + ASIDE if visited else ASIDE) if rng.chance(0.4) else ""
    last = rng.pick(closing) if closing and (not body or rng.chance(0.4)) else " / "
    slots = {
        "a": aspects[0],
        "b": aspects[1],
        "s": "the " + aspects[0],
        "S": "The " + aspects[0],
        "v": rng.pick(STRESS),
        "thing": rng.pick(topic.names.split(",")),
        "friend": rng.pick(FRIENDS),
    }
    good, bad = words.split("/")
    last_good, last_bad = last.split(" / ")
    positive = " ".join(part for part in (aside, body, last_good) if part)
    negative = " ".join(part for part in (aside, body, last_bad) if part)
    return positive.format(X=good, Y=bad, **slots), negative.format(X=bad, Y=good, **slots)


def make_reviews(pairs: int = 4_800) -> str:
    rng = Dice(3)
    rows: list[str] = []
    seen: set[str] = set()
    while len(rows) < 2 * pairs:
        positive, negative = review_pair(rng)
        lengths = len(positive.split()), len(negative.split())
        if positive in seen or negative in seen or min(lengths) < 6 or max(lengths) > 35:
            continue
        seen |= {positive, negative}
        rows += [positive + "\tpositive", negative + "\tnegative"]
    rng.shuffle(rows)
    return "\n".join(["text\tlabel", *rows]) + "\n"


# ---------------------------------------------------------------------------------------------
# dates.tsv
# ---------------------------------------------------------------------------------------------

MONTHS = "January February March April May June July August September October November December"
ROMAN = "I II III IV V VI VII VIII IX X XI XII"
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
ORDINALS = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth "
    "fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth twenty-first "
    "twenty-second twenty-third twenty-fourth twenty-fifth twenty-sixth twenty-seventh "
    "twenty-eighth twenty-ninth thirtieth thirty-first"
)
ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
# No spelling has two meanings: with dots the day comes first, with slashes the month (or a year of
# four digits), and a year of two digits is between 1930 and 2029.
SPELLINGS = (
    "{d} {month} {y}",
    "{nth} {month} {y}",
    "the {nth} of {month} {y}",
    "the {ordinal} of {month} {y}",
    "the {ordinal} of {month}, {year}",
    "the {ordinal} day of the {ordinal_month} month of {y}",
    "{month} {d}, {y}",
    "{month} {nth}, {y}",
    "{month} the {ordinal}, {y}",
    "{mon} {d} {y}",
    "{d}-{mon}-{y}",
    "{weekday}, {d} {month} {y}",
    "{weekday} the {nth} of {month} {y}",
    "{wd} {d} {mon} {y}",
    "{weekday}, {month} {d}, {y}",
    "{d} {roman} {y}",
    "{d}.{m}.{y}",
    "{m:02}/{d:02}/{y}",
    "{y}/{m}/{d}",
    "{y}, {month} {d}",
    "{y}{m:02}{d:02}",
    "{d} {month} '{yy:02}",
    "{d}.{m}.{yy:02}",
)


def year_in_words(year: int) -> str:
    """1998 as "nineteen ninety-eight", 1905 as "nineteen oh five", 2000 as "two thousand"."""
    ones, tens = ONES.split(), TENS.split()
    century, rest = divmod(year, 100)
    last = ones[rest] if rest < 20 else tens[rest // 10 - 2]
    if rest > 20 and rest % 10:
        last += "-" + ones[rest % 10]
    if century == 20 and rest < 10:
        return "two thousand" + (f" and {last}" if rest else "")
    first = "twenty" if century == 20 else ones[century]
    return f"{first} {'hundred' if not rest else 'oh ' * (rest < 10) + last}"


def spell_date(day: date, spelling: str) -> str:
    month, ordinals = MONTHS.split()[day.month - 1], ORDINALS.split()
    weekday = WEEKDAYS.split()[day.weekday()]
    ending = {1: "st", 2: "nd", 3: "rd"}.get(day.day % 10 if day.day // 10 != 1 else 0, "th")
    return spelling.format(
        d=day.day,
        m=day.month,
        y=day.year,
        yy=day.year % 100,
        nth=f"{day.day}{ending}",
        ordinal=ordinals[day.day - 1],
        ordinal_month=ordinals[day.month - 1],
        month=month,
        mon=month[:3],
        roman=ROMAN.split()[day.month - 1],
        weekday=weekday,
        wd=weekday[:3],
        year=year_in_words(day.year),
    )


def date_pairs(rng: Dice, dates: int, known: Container[str] = ()) -> Iterator[tuple[str, str]]:
    """Different dates from 1900 to 2099 that are not `known`, each in two spellings."""
    start, seen = date(1900, 1, 1).toordinal(), set[str]()
    days = date(2100, 1, 1).toordinal() - start
    while len(seen) < dates:
        day = date.fromordinal(start + rng.below(days))
        iso = day.isoformat()
        if iso in seen or iso in known:
            continue
        seen.add(iso)
        spellings = [s for s in SPELLINGS if "{yy" not in s or 1930 <= day.year < 2030]
        rng.shuffle(spellings)
        yield from ((spell_date(day, spelling), iso) for spelling in spellings[:2])


def make_dates(dates: int = 5_000) -> str:
    rng = Dice(4)
    return pairs_table(list(date_pairs(rng, dates)), rng)


def fresh_dates(dates: int, seed: int) -> list[tuple[str, str]]:
    """Pairs with dates that are not in the file."""
    known = {target for _, target in read_pairs_table(make_dates())}
    return list(date_pairs(Dice(seed), dates, known))


def pairs_table(pairs: list[tuple[str, str]], rng: Dice) -> str:
    rng.shuffle(pairs)
    return "\n".join(["source\ttarget", *map("\t".join, pairs)]) + "\n"


def read_pairs_table(text: str) -> list[list[str]]:
    return [line.split("\t") for line in text.splitlines()[1:]]


# ---------------------------------------------------------------------------------------------
# veltish.tsv
# ---------------------------------------------------------------------------------------------


# Veltish is a made-up language. Its verb comes last, and what belongs to a noun comes before it
# (relative clauses, genitives, articles) or after it (adjectives, numbers). Nouns end in a (bright)
# or u (dark). Nouns, adjectives, participles and "this" agree in this vowel, in number and in case:
#
#     the king loves the old dog that saw two cats.
#     al  rega misum dvo sevadantam  al  koram vetam ame.
#     the king cats  two having-seen the dog   old   loves.
#
# A clause with "because" or "when" moves to the front. In English, a phrase such as "in the garden"
# belongs to the nearest verb before it, and "that" to the nearest noun: no sentence is ambiguous.
def lexicon(words: str) -> dict[str, str]:
    """Each English word with its translation."""
    return dict(pair.split(":") for pair in words.split())


PEOPLE = lexicon(
    "dog:kora cat:misu king:rega queen:solu farmer:tema teacher:lavu doctor:nira baker:pohu "
    "sailor:yara hunter:gamu singer:vira painter:jolu girl:dina boy:batu child:peka woman:sena "
    "man:orvu bird:tila horse:hastu fox:ruva wolf:darnu mouse:pilu sister:elma brother:ostu"
)
THINGS = lexicon(
    "apple:fema book:kitu letter:zora lamp:lumu stone:grana flower:bisu ring:onda basket:kestu "
    "boat:nava chair:seltu key:cleva cup:tassu hat:mopa"
)
PLACES = lexicon(
    "garden:horta forest:silvu house:doma village:vesku river:rena tower:turu market:trega "
    "school:skolu bridge:ponta field:agru castle:borga hill:holmu"
)
NOUNS = PEOPLE | THINGS | PLACES
IRREGULAR = {
    "child": "children",
    "woman": "women",
    "man": "men",
    "fox": "foxes",
    "wolf": "wolves",
    "mouse": "mice",
}
PLURALS = {IRREGULAR.get(noun, noun + "s"): noun for noun in NOUNS}
# A noun has at most one adjective of each kind; only people and animals have those of LIVELY.
LIVELY = [lexicon(kind) for kind in ("happy:fel sad:tris", "brave:bron clever:sag hungry:fam")]
PLAIN = [
    lexicon(kind)
    for kind in ("big:bel small:mik", "red:rud green:zel white:alb black:nig", "old:vet new:nov")
]
ADJECTIVES = {english: stem for kind in LIVELY + PLAIN for english, stem in kind.items()}
NUMBERS = lexicon("two:dvo three:tri four:kvar five:pen seven:sep ten:dek")
ARTICLES = {"the": "al", "a": "", "my": "min", "your": "tin"}
CASES = {"subject": "", "object": "m", "of": "s", "to": "t", "in": "l", "with": "k", "from": "r"}
POSTPOSITIONS = {"under": "sub", "near": "pre", "behind": "dor"}  # after the genitive
TIMES = {"yesterday": "ger", "today": "hoy", "tomorrow": "mar"}
JOINED = {"because": "da", "when": "vo"}
# English verb, its past tense, and the Veltish stem.
WITH_OBJECT = (
    "see saw sev,love loved am,hear heard aud,find found trov,carry carried port,follow followed "
    "sek,paint painted pint,watch watched gard,help helped hilf,hold held ten,hide hid kelt,call "
    "called vok"
)
WITHOUT = (
    "sleep slept dorm,sing sang kant,run ran kur,wait waited vart,laugh laughed rid,dance danced "
    "salt,work worked labr,swim swam nat"
)
GIVING = "give gave dav,send sent mit,show showed mont,bring brought nes,sell sold vend"
OBJECT_VERBS, PLAIN_VERBS, GIVING_VERBS = (
    [tuple(verb.split()) for verb in verbs.split(",")] for verbs in (WITH_OBJECT, WITHOUT, GIVING)
)
VERBS = OBJECT_VERBS + PLAIN_VERBS + GIVING_VERBS
TAKES_OBJECT = {verb for verb, _, _ in OBJECT_VERBS + GIVING_VERBS}
TENSES = {"present": "", "past": "ad", "future": "ir"}
AUXILIARIES = {"do": "present", "does": "present", "did": "past", "will": "future"}


def third_person(verb: str) -> str:
    if verb.endswith("ry"):
        return verb[:-1] + "ies"
    return verb + ("es" if verb.endswith(("ch", "sh", "s")) else "s")


# Each form of a verb: its infinitive, its tense and its Veltish stem.
FORMS = {verb: (verb, "present", stem) for verb, _, stem in VERBS}
FORMS |= {third_person(verb): (verb, "present", stem) for verb, _, stem in VERBS}
FORMS |= {past: (verb, "past", stem) for verb, past, stem in VERBS}


class Phrase(NamedTuple):
    """A noun with all that belongs to it."""

    noun: str
    plural: bool
    article: str
    number: str
    adjectives: list[str]
    owner: "Phrase | None"
    clause: "Clause | None"  # that ...
    object_of: bool  # in the clause, the noun is the object


class Clause(NamedTuple):
    subject: Phrase | None  # None: the noun of a relative clause
    stem: str
    tense: str
    negated: bool
    thing: Phrase | None
    phrases: list[tuple[str, Phrase]]  # each with its preposition


class English:
    """Reads the words of an English sentence from left to right."""

    def __init__(self, words: list[str]) -> None:
        self.words = [*words, ""]  # the end

    def next_in(self, words: Container[str]) -> str:
        return self.words.pop(0) if self.words[0] in words else ""

    def phrase(self) -> Phrase:
        article, number = self.next_in({*ARTICLES, "this", "these"}), self.next_in(NUMBERS)
        adjectives = []
        while adjective := self.next_in(ADJECTIVES):
            adjectives.append(adjective)
        noun = self.next_in({*NOUNS, *PLURALS})
        if not noun:
            raise ValueError(f"{self.words[0]!r} is not a noun")
        owner = self.phrase() if self.next_in(["of"]) else None
        clause, object_of = None, False
        if self.next_in(["that"]):
            object_of = self.words[0] not in {*FORMS, *AUXILIARIES}
            clause = self.clause(self.phrase() if object_of else None, object_of)
        plural, singular = noun in PLURALS, PLURALS.get(noun, noun)
        return Phrase(singular, plural, article, number, adjectives, owner, clause, object_of)

    def clause(
        self, subject: Phrase | None, without_object: bool = False, tense: str = ""
    ) -> Clause:
        tense = tense or AUXILIARIES.get(self.next_in(AUXILIARIES), "")
        negated = bool(self.next_in(["not"]))
        if self.words[0] not in FORMS:
            raise ValueError(f"{self.words[0]!r} is not a verb")
        verb, own_tense, stem = FORMS[self.words.pop(0)]
        thing = self.phrase() if verb in TAKES_OBJECT and not without_object else None
        phrases = []
        while preposition := self.next_in({*CASES, *POSTPOSITIONS} - {"of"}):
            phrases.append((preposition, self.phrase()))
        return Clause(subject, stem, tense or own_tense, negated, thing, phrases)


def veltish_phrase(phrase: Phrase, case: str) -> list[str]:
    noun = NOUNS[phrase.noun]
    vowel = noun[-1]
    # After a number, the singular is used.
    ending = ("ni" if phrase.plural and not phrase.number else "") + CASES[case]
    words = []
    if phrase.clause is not None:
        words += veltish_clause(phrase.clause, "ot" if phrase.object_of else "ant")
        words[-1] += vowel + ending
    words += veltish_phrase(phrase.owner, "of") if phrase.owner else []
    this = phrase.article in ("this", "these")
    words += ["h" + vowel + ending] if this else filter(None, [ARTICLES.get(phrase.article)])
    words.append(noun + ending)
    words += [ADJECTIVES[adjective] + vowel + ending for adjective in phrase.adjectives]
    return words + ([NUMBERS[phrase.number]] if phrase.number else [])


def veltish_clause(clause: Clause, participle: str = "") -> list[str]:
    """Subject, phrases, object, verb; in a relative clause, the verb is a participle."""
    words = []
    if clause.subject:
        words += veltish_phrase(clause.subject, "of" if participle else "subject")
    for preposition, phrase in clause.phrases:
        after = POSTPOSITIONS.get(preposition)
        words += veltish_phrase(phrase, "of" if after else preposition) + ([after] if after else [])
    words += veltish_phrase(clause.thing, "object") if clause.thing else []
    plural = clause.subject is not None and (clause.subject.plural and not participle)
    ending = participle or ("en" if plural else "e")
    verb = clause.stem + TENSES[clause.tense] + ending
    return [*words, "ne", verb] if clause.negated else [*words, verb]


def translate_to_veltish(sentence: str) -> str:
    """The only right translation of an English sentence; ValueError if it is not one of ours."""
    mark = sentence[-1:]
    english = English(sentence.removesuffix(mark).split(" "))
    time = english.next_in(TIMES)
    tense = AUXILIARIES.get(english.next_in(AUXILIARIES), "") if mark == "?" else ""
    words = veltish_clause(english.clause(english.phrase(), tense=tense))
    if time:
        words.insert(len(words) - (1 + (words[-2:-1] == ["ne"])), TIMES[time])
    while joint := english.next_in({*JOINED, "and"}):
        other = veltish_clause(english.clause(english.phrase()))
        words = [*words, "i", *other] if joint == "and" else [*other, JOINED[joint] + ",", *words]
    if english.words != [""] or mark not in (".", "?"):
        raise ValueError(f"no more words expected before {english.words[0]!r}")
    return " ".join([*words, "ku"] if mark == "?" else words) + mark


def english_phrase(rng: Dice, nouns: Sequence[str], room: int) -> tuple[str, bool]:
    """A phrase with a noun, and whether it is in the plural; with `room`, more belongs to it."""
    noun, plural = rng.pick(nouns), rng.chance(0.4)
    number = rng.pick([*NUMBERS]) if plural and rng.chance(0.4) else ""
    article = rng.pick(["the", "the", "the", "my", "your", "these" if plural else "this"])
    if rng.chance(0.3):
        article = "" if plural else "a"
    kinds = LIVELY + PLAIN if noun in PEOPLE else [*PLAIN]
    rng.shuffle(kinds)
    count = rng.pick([0, 0, 1] if room < 1 else [0, 1, 1, 2])
    adjectives = [rng.pick([*kind]) for kind in kinds[:count]]
    plurals = {singular: word for word, singular in PLURALS.items()}
    words = [article, number, *adjectives, plurals[noun] if plural else noun]
    if room > 1 and rng.chance(0.25):
        words += ["of", english_phrase(rng, [*PEOPLE], 0)[0]]
    elif room > 1 and rng.chance(0.5):
        words += ["that", english_relative(rng, noun, plural, room - 2)]
    return " ".join(filter(None, words)), plural


def english_relative(rng: Dice, noun: str, plural: bool, room: int) -> str:
    if noun in PEOPLE and rng.chance(0.6):
        return english_predicate(rng, plural, room)
    subject, plural = english_phrase(rng, [*PEOPLE], 0)
    verb = english_verb(rng, rng.pick(OBJECT_VERBS), plural)
    return f"{subject} {verb}" + (f" {english_place(rng)}" if rng.chance(0.2) else "")


def english_place(rng: Dice) -> str:
    preposition = rng.pick(["in", "in", "with", "from", *POSTPOSITIONS])
    nouns = {"with": [*PEOPLE, *THINGS], "near": [*PEOPLE, *PLACES]}.get(preposition, [*PLACES])
    return f"{preposition} {english_phrase(rng, nouns, 0)[0]}"


def english_verb(rng: Dice, verb: tuple[str, ...], plural: bool, tense: str = "") -> str:
    infinitive, past, _ = verb
    tense = tense or rng.pick(["present", "present", "past", "past", "future"])
    negated = "not " if rng.chance(0.15) else ""
    if tense == "future":
        return f"will {negated}{infinitive}"
    if negated:
        return {"past": "did", "present": "do" if plural else "does"}[tense] + f" not {infinitive}"
    return past if tense == "past" else infinitive if plural else third_person(infinitive)


def english_predicate(
    rng: Dice, plural: bool, room: int, tense: str = "", infinitive: bool = False
) -> str:
    """A verb and what belongs to it."""
    kind = rng.pick([PLAIN_VERBS, OBJECT_VERBS, OBJECT_VERBS, GIVING_VERBS][: 4 if room > 1 else 3])
    verb = rng.pick(kind)
    words = [verb[0] if infinitive else english_verb(rng, verb, plural, tense)]
    if kind is GIVING_VERBS:
        words.append(english_phrase(rng, [*THINGS], 0)[0])
        words.append("to " + english_phrase(rng, [*PEOPLE], 0)[0])
    elif kind is OBJECT_VERBS:
        words.append(english_phrase(rng, [*PEOPLE, *PEOPLE, *THINGS], room)[0])
    if room > 0 and rng.chance(0.4):
        words.append(english_place(rng))
    return " ".join(words)


def english_sentence(rng: Dice, room: int) -> str:
    """A sentence; the more `room` the longer."""
    subject, plural = english_phrase(rng, [*PEOPLE], room - rng.below(2))
    tense = rng.pick(["present", "past", "future"])
    if rng.chance(0.12):
        auxiliary = {"past": "did", "future": "will"}.get(tense, "do" if plural else "does")
        return f"{auxiliary} {subject} {english_predicate(rng, plural, room, tense, True)}?"
    time = {"past": "yesterday", "present": "today", "future": "tomorrow"}[tense]
    words = [time] if rng.chance(0.15) else []
    words += [subject, english_predicate(rng, plural, room, tense)]
    if room > 0 and rng.chance(0.3):
        subject, plural = english_phrase(rng, [*PEOPLE], 0)
        words += [rng.pick(["and", *JOINED]), subject, english_predicate(rng, plural, 1)]
    return " ".join(words) + "."


def veltish_pairs(rng: Dice, count: int, known: Container[str] = ()) -> Iterator[tuple[str, str]]:
    """Different sentences of 3 to 25 words that are not `known`, each with its translation."""
    seen: set[str] = set()
    while len(seen) < count:
        sentence = english_sentence(rng, rng.below(5))
        if sentence not in seen and sentence not in known and 2 < sentence.count(" ") + 1 < 26:
            seen.add(sentence)
            yield sentence, translate_to_veltish(sentence)


def make_veltish(pairs: int = 12_000) -> str:
    rng = Dice(5)
    return pairs_table(list(veltish_pairs(rng, pairs)), rng)


def fresh_veltish(pairs: int, seed: int) -> list[tuple[str, str]]:
    """Pairs with sentences that are not in the file."""
    known = {source for source, _ in read_pairs_table(make_veltish())}
    return list(veltish_pairs(Dice(seed), pairs, known))


# ---------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------

FILES: dict[str, Callable[[], str]] = {
    "tiny.txt": make_tiny,
    "stories.txt": make_stories,
    "reviews.tsv": make_reviews,
    "dates.tsv": make_dates,
    "veltish.tsv": make_veltish,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write nanolm's example data sets.")
    parser.add_argument("--check", action="store_true", help="compare the files and write nothing")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).resolve().parent, help="output folder"
    )
    args = parser.parse_args(argv)
    differing = 0
    if not args.check:
        args.out.mkdir(parents=True, exist_ok=True)
    for name, make in FILES.items():
        path: Path = args.out / name
        content = make().encode("ascii")
        if not args.check:
            path.write_bytes(content)
            print(f"{path}: {len(content):,} bytes")
        elif not path.is_file():
            print(f"{path}: missing")
            differing += 1
        elif path.read_bytes() != content:
            print(f"{path}: differs from what would be generated")
            differing += 1
    if args.check and not differing:
        print("all files match")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
