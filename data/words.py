"""The words that the corpus knows: names, things, colours, and the wishes of retellings."""
import re

# ---------------------------------------------------------------- words
# Names, by who bears them.  Exchanged for one of the same line, or, with all pronouns, of the
# other gender.
NAMES = {
    "boy": """
        Tim Tom Ben Sam Max Timmy Bob Jack Joe John Billy Tommy Benny Jimmy Andy Peter Leo Bobby
        Fred
        Danny Jake Jim James Frank Pete Finn Tony Mike Harry Toby Johnny Freddy Sammy Charlie
        Paul Luke
        Adam Oscar Henry Oliver Eric David Simon Noah Theo Felix Ethan Kevin Hugo""",
    "girl": """
        Lily Sue Lucy Mia Anna Amy Sara Sally Sarah Jane Molly Lila Jen Mimi Emma Jill Bella Mary
        Ella
        Emily Claire Jenny Betty Lisa Susie Mandy Lulu Alice Kate Annie Lola Julia Tina Sophie Penny
        Ellie Nora Clara Zoe Eva Ruby Nina Olivia Hannah Laura Maria Maya Polly Rosie Ida""",
    "pet": """
        Spot Buddy Rex Coco Fluffy Bobo Lucky Rusty Patches Biscuit Momo Pepper Ziggy Sparky Gus""",
}
NAMES = {kind: names.split() for kind, names in NAMES.items()}
GENDER = {name: kind for kind, names in NAMES.items() for name in names}
OTHER = {"boy": "girl", "girl": "boy"}
# Where one of these occurs, a pronoun may be somebody else's.
PEOPLE = {
    "boy": """
        man men dad daddy father papa king prince brother brothers grandpa grandfather mr uncle
        son sir
        boys fireman policeman clown wizard guy""",
    "girl": """
        woman women mom mommy mama mum mummy mother queen princess sister sisters grandma
        grandmother
        mrs aunt daughter lady girls fairy witch nanny mermaid""",
    "both": """
        teacher doctor nurse farmer driver owner neighbor baker officer animal animals creature
        monster
        dragon baby child stranger robot pet painter singer wolf snake bee bug bugs fish crab shark
        spider ant worm dinosaur giant ghost pirate captain kid""",
}
PEOPLE = {kind: set(words.split()) for kind, words in PEOPLE.items()}
TO_GIRL = {"he": "she", "him": "her", "himself": "herself", "boy": "girl"}
TO_BOY = {"she": "he", "hers": "his", "herself": "himself", "girl": "boy"}
# After "her" they tell that it is him, not his; after these verbs one cannot tell.
AFTER_HIM = set("""
    to and in on at with for that a an the if up very so some but when as because about how what
    into
    from out by of away again back too it was were all down off go come play feel was is or until
    while
    who where why not they he she his this every along home inside over through after before
    than""".split())
MAYBE_HIM = set("""
    gave give let made make help helped told asked keep kept show showed bring brought got get buy
    bought see saw hear heard teach taught tell ask offered handed watched""".split())
# Things, in lines within which one stands for another.
THINGS = (
    "ball doll kite truck robot drum balloon boat train puzzle rocket car plane",
    "cat dog rabbit mouse squirrel fox puppy kitten bunny hamster pig goat",
    "bear lion tiger elephant monkey horse cow giraffe zebra wolf",
    "bird butterfly bee owl parrot",
    "apple banana carrot cookie cake sandwich pie pear muffin peach tomato potato pancake",
    "hat scarf coat jacket shirt sweater cap",
    "park garden forest zoo meadow jungle playground",
    "lake river pond sea",
    "kitchen bedroom bathroom garage attic",
    "box basket bag bucket jar",
    "chair table bench sofa",
    "cup bowl plate pot",
    "spoon fork knife",
    "lamp mirror vase clock",
    "pillow blanket towel",
    "rock stone stick",
    "flower leaf shell feather",
    "coin key button ring whistle",
    "guitar flute violin trumpet piano",
    "bike scooter sled wagon",
)
THINGS = tuple(group.split() for group in THINGS)
GROUP = {word: group for group in THINGS for word in group}
ANIMALS = {word for group in THINGS[1:4] for word in group}
# What only some animals do or have.
ANIMAL_SOUNDS = re.compile(
    r"\b(bark|woof|meow|chirp|tweet|purr|quack|roar|hop|fl(y|ies|ew|ying)|wing|feather|buzz|"
    r"neigh|moo|oink|"
    r"squeak|nest|cheese|bone|trunk|mane|puppies|kitty|doggy|honey|oof|cub|carrot|leash|paw|"
    r"nut|sting|song|"
    r"sang|sing)")
IRREGULAR = {"mouse": "mice", "leaf": "leaves", "scarf": "scarves", "knife": "knives",
    "tomato": "tomatoes",
             "potato": "potatoes", "wolf": "wolves"}
COLOURS = "red blue green yellow pink purple white black brown orange".split()
# What has its own colour.
COLOURED = set("""
    sky water sea eyes eye ocean grass leaves leaf hair snow milk face cheeks fur light trees
    and""".split())
# A thing before one of these is part of another ("apple tree").
COMPOUND = set("tree house cream tail bed food store shop toy".split())
DETERMINERS = set("""
    a an the his her my your their our its this that another one no every each""".split())
ADJECTIVES = set("""
    big little small new old nice toy red blue green yellow pink purple white black brown orange
    pretty
    shiny special favorite tiny huge soft good bad best first other same beautiful lost broken whole
    fast funny friendly yummy warm cold wooden round magic long tall gray dirty clean large cute
    colorful happy sad empty full heavy own cool great lovely""".split())
SAID = "|".join("""
    said asked replied shouted cried answered yelled whispered exclaimed called screamed
    explained added
    agreed""".split())
FAMILY = set("Mom Dad Mommy Daddy Mum Mummy Mama Papa Grandma Grandpa".split())

# ---------------------------------------------------------------- wishes
AGAIN = (
    "Tell the same story with {}.",
    "Tell it again with {}.",
    "Tell it again, but with {}.",
    "Please tell me the same story with {}.",
    "Can you tell it again with {}?",
    "Now with {}.",
    "Write the story again with {}.",
    "The same story, please, with {}.",
    "Tell it once more, with {}.",
)
WISH_SAID = (
    "Write down only what {} said.",
    "What did {} say? Write down only that.",
    "Only what {} said, please.",
    "List everything that {} said.",
    "Give me only the words of {}.",
)
WISH_SHORTER = (
    "Tell it again, but shorter.",
    "Tell me the same story, but shorter.",
    "Make the story shorter.",
    "Can you tell it shorter?",
    "Only the beginning and the end, please.",
    "A shorter one, please.",
)
