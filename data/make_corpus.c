// The default corpus: simple English stories from a probabilistic grammar. Any size, no download, no licence, the same
// bytes for the same seed on every machine.
//
//     data/make_corpus --bytes 20000000 --seed 1 -o train.txt --val-bytes 500000 --val-output val.txt
//     data/make_corpus --print-entropy
//
// What makes it worth training on: a story has people, things, numbers and secret words that are chosen once, at their
// first mention, and come back hundreds of bytes later, when every one of their letters can be known; pronouns agree
// with names, numbers count down, things change hands. What makes it worth measuring on: the loss of a perfect model is
// known.
//
// THE FLOOR. The grammar is unambiguous: a text has exactly one derivation (corpus_check_grammar proves it), so the
// probability of a text is the product of the probabilities of the choices made, and the entropy H of a story is the
// expected sum of -ln(probability) over these choices. The byte-level tokenizer makes bytes + 1 tokens of a story (its
// end- of-text token included), and stories are independent, so
//
//     floor = H / (E[bytes] + 1)    nats per token
//
// is the mean loss of a model that knows the grammar and sees its story from the beginning. One whose window starts in
// the middle of a story has not seen the names, and stays a little above. H and E[bytes] are computed from the weights
// below, not sampled:
// - a rule's alternatives are chosen by weight and independently of all values, so H(rule) = sum of p (-ln p +
// H(parts));
// - a value is chosen uniformly from its list, without the k values it must differ from: ln(size - k);
// - nothing but the values themselves depends on which of a list's words were chosen, so by symmetry each slot is
//   uniform on its list wherever it is printed, and its expected bytes are the mean over the list.
#include "../lib/check.h"

#include <math.h>
#include <unistd.h>

#define CORPUS_SEPARATOR "\n<|endoftext|>\n" // as data/tokenize wants it

// ---------------------------------------------------------------------------------------------------------------------
// the words. No word of a list is a prefix of another one of it

#define CORPUS_MAX_WORDS 40

typedef struct {
    const char* name;
    const char* words[CORPUS_MAX_WORDS]; // up to the first NULL
} CorpusList;

static const CorpusList corpus_lists[] = {
    {"person", // 16 boys, then 16 girls: CORPUS_FIRST_GIRL
     {"Ben",  "Carl", "Dan",  "Eric", "Finn", "Gus",   "Jack",  "Ken",   "Leo",  "Max", "Nick",
      "Paul", "Ray",  "Ron",  "Vic",  "Zack", "Bella", "Clara", "Daisy", "Emma", "Fay", "Grace",
      "Jane", "Kate", "Lily", "Mia",  "Nora", "Penny", "Rose",  "Ruby",  "Vera", "Zoe"}},
    {"place",
     {"the river", "the lake", "the hill", "the barn", "the market", "the mill", "the bridge", "the garden",
      "the school", "the old tower", "the beach", "the forest", "the station", "the castle", "the pond",
      "the big field"}},
    {"color", {"red", "blue", "green", "yellow", "white", "black", "brown", "purple", "pink", "gray"}},
    {"thing",
     {"ball", "kite", "book",  "drum",   "boat",  "doll",   "hat",    "bell",   "lamp", "ring",    "cup",    "coat",
      "key",  "map",  "flute", "basket", "spoon", "mirror", "pencil", "shovel", "rope", "whistle", "button", "teapot"}},
    {"animal", {"dog", "cat", "duck", "goat", "fox", "rabbit", "horse", "bear", "mouse", "turtle", "pig", "crow"}},
    {"food", {"apple", "pear", "plum", "carrot", "cookie", "nut", "cake", "egg", "muffin", "lemon", "bun", "fig"}},
    {"spot",
     {"under the bed", "behind the door", "in a wooden box", "on the roof", "inside the well", "behind a big stone",
      "under the stairs", "in the tall grass", "between two trees", "on top of the wall", "below the window",
      "at the end of the path"}},
    {"job", {"baker", "farmer", "teacher", "sailor", "doctor", "tailor", "gardener", "painter"}},
    {"word", {"moon",   "salt",   "honey",   "thunder", "pepper", "feather", "candle", "marble",
              "pickle", "ladder", "pumpkin", "velvet",  "copper", "island",  "winter", "dragon",
              "butter", "rocket", "silver",  "garlic",  "violin", "hammer",  "oyster", "zebra"}},
    {"pet", {"Biscuit", "Patch", "Rusty", "Lucky", "Pebble", "Domino", "Muddy", "Clover", "Ginger", "Whiskers"}},
    {"number", {"four", "five", "six", "seven", "eight", "nine"}}, // CORPUS_FIRST_NUMBER and up
};
#define CORPUS_NUM_LISTS ((int)(sizeof(corpus_lists) / sizeof(corpus_lists[0])))
#define CORPUS_FIRST_GIRL 16
#define CORPUS_FIRST_NUMBER 4

static const char* const corpus_numbers[] = {"zero", "one",   "two",   "three", "four", "five",
                                             "six",  "seven", "eight", "nine",  "ten"};

// A slot remembers one word of its list, from where it is chosen to the end of the story.
typedef struct {
    const char *name, *list;
} CorpusSlot;

static const CorpusSlot corpus_slots[] = {
    {"hero", "person"},  {"friend", "person"}, {"other", "person"},  {"holder", "person"}, {"place", "place"},
    {"place2", "place"}, {"place3", "place"},  {"color", "color"},   {"color2", "color"},  {"thing", "thing"},
    {"thing2", "thing"}, {"thing3", "thing"},  {"animal", "animal"}, {"seen", "animal"},   {"food", "food"},
    {"spot", "spot"},    {"spot2", "spot"},    {"spot3", "spot"},    {"found", "spot"},    {"job", "job"},
    {"passer", "job"},   {"snack", "food"},    {"hue", "color"},     {"item", "thing"},    {"lender", "person"},
    {"word", "word"},    {"word2", "word"},    {"word3", "word"},    {"pet", "pet"},       {"num", "number"},
};
#define CORPUS_NUM_SLOTS ((int)(sizeof(corpus_slots) / sizeof(corpus_slots[0])))

// How a slot can be printed: {food} apple, {food.a} an apple, {food.s} apples; for persons he, him, his, He;
// for numbers m1 (one less), m2 (two less), p1 (one more).
enum { FORM_PLAIN, FORM_A, FORM_S, FORM_HE, FORM_HIM, FORM_HIS, FORM_CAPITAL_HE, FORM_M1, FORM_M2, FORM_P1, NUM_FORMS };
static const char* const corpus_form_names[NUM_FORMS] = {"", "a", "s", "he", "him", "his", "He", "m1", "m2", "p1"};

// ---------------------------------------------------------------------------------------------------------------------
// the grammar. Rows of one name are the alternatives of a rule, chosen by weight.
//     [rule]            one alternative of that rule
//     {+slot!a!b.form}  choose the slot's word, different from those of slots a and b, and print it
//     {slot.form}       print the word chosen before
//     {slot=other}      the slot now has the other slot's word; prints nothing

typedef struct {
    const char* rule;
    int weight;
    const char* text;
} CorpusRow;

static const CorpusRow corpus_rows[] = {
    // a lost thing, looked for in up to three places
    {"story", 5,
     "[open] {hero.He} had a {+color} {+thing} and [loved].\n"
     "[solos]Later, at {+place2!place}, {hero} opened {hero.his} bag. The {color} {thing} was gone! {hero.He} "
     "felt [sad].\n"
     "{+friend!hero} came by and asked, \"What is wrong?\"\n"
     "\"I have lost my {color} {thing},\" said {hero}.\n"
     "\"Do not [worry],\" said {friend}. \"I will help you.\"\n"
     "[search]\n"
     "[pairs][foundend]"},
    // a present, which may be passed on: who has it in the end?
    {"story", 5,
     "[open] It was the birthday of {+friend!hero}, and {hero} wanted to give {friend.him} something [nice]. At "
     "{+place2!place} {hero.he} found a {+color} {+thing}.\n"
     "\"{friend} will like this,\" said {hero}.\n"
     "[solos]{friend} was at {+place3!place!place2}. {hero} ran there and gave {friend.him} the {color} {thing}.\n"
     "[thanks] [pass]\n"
     "[pairs]In the evening {holder} put the {color} {thing} next to {holder.his} bed. [night]"},
    // counting down, and once up
    {"story", 5,
     "[open] {hero.He} had {+num} {+food.s} in {hero.his} basket.\n"
     "[solos]{+friend!hero} came along and looked [sad]. \"I am so hungry,\" said {friend}. {hero} gave "
     "{friend.him} one {food}, so {num.m1} {food.s} were left.\n"
     "[pairs][countmore]"},
    // hide and seek: two people, two places, found in either order
    {"story", 4,
     "[open] {+friend!hero} and {+other!hero!friend} were there, too.\n"
     "\"Let us play hide and seek,\" said {friend}. {hero} closed {hero.his} eyes and counted to {+num}. {friend} "
     "hid {+spot}, and {other} hid {+spot2!spot}.\n"
     "\"Here I come!\" said {hero}.\n"
     "[solos][seek]\n"
     "Then it was time to go home. [night]"},
    // an animal in trouble, a helper with a job, a name for the animal
    {"story", 4,
     "[open] {hero.He} heard a [sound] sound. A [size] {+animal} was stuck {+spot} and could not get out.\n"
     "[solos]{hero} ran to {+friend!hero}, the {+job}. \"Please help! There is {animal.a} {spot}!\" {hero.he} "
     "said.\n"
     "The {job} took a {+thing} and came along. [pull] Soon the {animal} was free.\n"
     "[pairs]\"It needs a name,\" said {friend}.\n"
     "\"I will call it {+pet},\" said {hero}.\n"
     "[petend]"},
    // a secret word of two words, asked for much later
    {"story", 4,
     "[open] {+friend!hero} had a secret house near {+place2!place}. \"Nobody can come in without the secret "
     "word,\" said {friend}. \"It is {+word} {+word2!word}. Do not tell anyone!\"\n"
     "\"I will not,\" said {hero}.\n"
     "[solos][solos]After lunch {hero} stood in front of the secret house. The door was [door].\n"
     "\"What is the secret word?\" asked {friend} from inside.\n"
     "[answer]"},
    // things change hands
    {"story", 4,
     "[open] {hero.He} had a {+color} {+thing} but wanted something else. [solo]\n"
     "Then {hero.he} met {+friend!hero}, who had a {+color2!color} {+thing2!thing}. \"I will give you my {thing} "
     "for your {thing2},\" said {hero}. {friend} [agreed], and so {hero} got the {color2} {thing2} and {friend} "
     "got the {color} {thing}.\n"
     "[solos][trademore]"},

    // every opening chooses hero and place
    {"open", 8, "One [weather] [daytime] {+hero} went to {+place}."},
    {"open", 5, "Once there was a [trait] child named {+hero}, who lived near {+place}."},
    {"open", 4, "{+hero} woke up early. It was [weather] outside, so {hero.he} walked to {+place}."},
    {"open", 3, "At {+place} a [trait] child sat in the grass. It was {+hero}."},
    {"open", 2, "This is a story about {+hero}, a [trait] child who liked {+place} more than any other place."},

    // the lost thing
    {"loved", 5, "loved it very much"},
    {"loved", 3, "took it everywhere"},
    {"loved", 2, "was proud of it"},
    {"worry", 4, "worry"},
    {"worry", 3, "cry"},
    {"worry", 2, "be sad"},
    {"search", 3, "They looked {+spot}, and there it was!{found=spot}"},
    {"search", 4,
     "They looked {+spot}, but it was not there. They looked {+spot2!spot}, and there it was!{found=spot2}"},
    {"search", 3,
     "They looked {+spot}, but it was not there. They looked {+spot2!spot}, but there was only a [size] "
     "{+animal}. They looked {+spot3!spot!spot2}, and there it was!{found=spot3}"},
    {"foundend", 4, "That night {hero} told everyone how {friend} had found the {color} {thing} {found}."},
    {"foundend", 3,
     "\"Who would look for a {thing} {found}?\" laughed {hero}. {hero.He} thanked {friend} and went home."},
    {"foundend", 2, "{hero} never left the {color} {thing} {found} again."},

    // the present
    {"thanks", 5, "\"Thank you, {hero}!\" said {friend}."},
    {"thanks", 3, "\"A {thing}! Just what I wanted,\" said {friend}."},
    {"thanks", 2, "{friend} was so [happy] that {friend.he} [jumped]."},
    {"pass", 5, "{friend} kept it and played with it all day.{holder=friend}"},
    {"pass", 3,
     "Then {+other!hero!friend} came, who had no present at all, so {friend} let {other.him} have "
     "it.{holder=other}"},
    {"pass", 2,
     "They played with it, but then {friend} had to go and said, \"Please keep it for me, {hero}.\"{holder=hero}"},

    // counting
    {"countmore", 4, "{hero} went home and put the {num.m1} {food.s} on the table. [night]"},
    {"countmore", 4,
     "On the way home a [size] {+animal} ran after {hero.him}. It wanted {food.a}, too, and it got one. So {hero} "
     "came home with {num.m2} {food.s}. [night]"},
    {"countmore", 2,
     "Then {friend} found another {food} {+spot}, and then one more {+spot2!spot}. \"These are for you,\" "
     "{friend.he} said. So {hero} came home with {num.p1} {food.s}, one more than before. [night]"},

    // hide and seek
    {"seek", 3,
     "{hero} looked {spot} and found {friend}. After that {hero.he} looked {spot2} and found {other}, too. \"I "
     "knew it!\" said {hero}."},
    {"seek", 3,
     "{hero} could not see {friend} anywhere, but it was easy to find {other} {spot2}. \"Where is {friend}?\" "
     "asked {hero}. {other} only [smiled]. At last {hero} looked {spot}, and there {friend.he} was."},
    {"seek", 1,
     "\"I give up!\" {hero} said at last. So {friend} came out from where {friend.he} was, {spot}, and {other} "
     "from where {other.he} was, {spot2}."},

    // the rescue
    {"pull", 3, "{friend} pulled, and {hero} pushed."},
    {"pull", 2, "With the {thing} in one hand, {friend} climbed up to it and {hero} held {friend.his} feet."},
    {"pull", 1, "It took a long time, and the {thing} broke in two, but they did not stop."},
    {"petend", 4, "Since that day {pet} the {animal} has lived with {hero} near {place}."},
    {"petend", 3, "{pet} followed {hero} all the way home. Every day {hero.he} took {pet} to {place} to see {friend}."},
    {"petend", 2, "So {pet} stayed with {friend} the {job}, and {hero} came to visit every week."},

    // the secret word
    {"door", 3, "green"},
    {"door", 2, "locked"},
    {"door", 1, "very small"},
    {"answer", 5, "\"{word} {word2}!\" said {hero}. The door opened, and they [played] until it was dark."},
    {"answer", 2,
     "\"{+word3!word!word2} {word2}!\" said {hero}.\n"
     "\"No, not {word3},\" said {friend}. \"Think again!\"\n"
     "\"Then it must be {word} {word2},\" said {hero}. The door opened."},
    {"answer", 1,
     "{hero} had to think. \"Was it {word}?\" {hero.he} asked. \"Half of it,\" said {friend}. \"{word} {word2}!\" "
     "said {hero}."},

    // the trade
    {"trademore", 3, "At home {hero} looked at the {color2} {thing2} for a long time. [regret] [night]"},
    {"trademore", 4,
     "At {+place2!place} {+other!hero!friend} came along with a {+thing3!thing!thing2}. {other.He} liked the "
     "{color2} {thing2}, and so they traded, too. Now {other} had the {color2} {thing2}, {friend} had the {color} "
     "{thing}, and {hero} went home with the {thing3}. [night]"},
    {"regret", 3, "\"{friend} must be happy with the {color} {thing} now,\" {hero.he} said."},
    {"regret", 2, "It was much better than the {color} {thing}."},
    {"agreed", 4, "agreed"},
    {"agreed", 3, "thought for a while and said yes"},
    {"agreed", 1, "shook {friend.his} head at first, but then laughed and agreed"},

    // paragraphs of what one or two people see and do
    {"solos", 3, "[solo]\n"},
    {"solos", 4, "[solo] [solo]\n"},
    {"solos", 3, "[solo] [solo] [solo]\n"},
    {"solo", 12, "The sun was [shining]."},
    {"solo", 9, "{hero} [walked] along the [road] and [sang]."},
    {"solo", 7, "{hero.He} saw {+seen.a} near {place}, and the {seen} [looked] at {hero.him}."},
    {"solo", 6, "The wind blew [softly] over {place}."},
    {"solo", 5, "{hero} felt [happy] and [jumped]."},
    {"solo", 5, "\"What a [weather] day,\" {hero} said."},
    {"solo", 5, "In the distance a {+passer} carried a {+hue} {+item}."},
    {"solo", 3, "\"I would like {+snack.a} now,\" thought {hero}."},
    {"solo", 4, "A [size] bird sat [where] and [sang]."},
    {"solo", 4, "{hero.He} thought about [thought]."},
    {"solo", 3, "{hero} picked a [size] flower and put it into {hero.his} pocket."},
    {"solo", 3, "It began to rain, but {hero} did not [mind]."},
    {"solo", 2, "After a while {hero.he} sat down [where] and rested."},
    {"solo", 2, "An old [man] was there and told {hero.him} about [thought]."},
    {"solo", 1, "{hero} tried to count the clouds, but there were too many of them."},
    {"pairs", 3, "[pair]\n"},
    {"pairs", 4, "[pair] [pair]\n"},
    {"pairs", 2, "[pair] [pair] [pair]\n"},
    {"pair", 8, "{hero} and {friend} [walked] along the [road] and [sang]."},
    {"pair", 6, "They sat [where] and talked about [thought]."},
    {"pair", 5, "\"You are my best friend,\" said {friend}."},
    {"pair", 5, "\"I once had a {+hue} {+item},\" said {friend}, \"but {+lender!hero!friend} has it now.\""},
    {"pair", 4, "They were both [happy]."},
    {"pair", 4, "\"Look at the [size] clouds,\" said {friend}, and {hero} [looked] up."},
    {"pair", 3, "They [played] until they were tired."},
    {"pair", 3, "The mother of {friend} gave them [drink]."},
    {"pair", 2, "{hero} told {friend} a story about {+seen.a} that could [trick]."},
    {"pair", 1, "\"Tomorrow,\" said {hero}, \"we will go to {place} and look for [thought].\""},

    {"night", 5, "It had been a [good] day."},
    {"night", 4, "Soon {hero} was fast asleep."},
    {"night", 3, "{hero} dreamed of [thought]."},
    {"night", 2, "\"Good night,\" said {hero.his} mother."},
    {"night", 1, "The moon came up over {place}, and all was quiet."},

    {"weather", 8, "sunny"},
    {"weather", 5, "cold"},
    {"weather", 4, "rainy"},
    {"weather", 3, "windy"},
    {"weather", 2, "beautiful"},
    {"weather", 1, "foggy"},
    {"daytime", 6, "morning"},
    {"daytime", 5, "day"},
    {"daytime", 2, "afternoon"},
    {"trait", 5, "kind"},
    {"trait", 4, "clever"},
    {"trait", 3, "brave"},
    {"trait", 2, "shy"},
    {"trait", 2, "cheerful"},
    {"trait", 1, "very patient"},
    {"size", 6, "little"},
    {"size", 4, "big"},
    {"size", 2, "tiny"},
    {"size", 2, "white"},
    {"size", 1, "funny"},
    {"sad", 4, "sad"},
    {"sad", 3, "tired"},
    {"sad", 2, "lonely"},
    {"sad", 1, "very unhappy"},
    {"nice", 4, "special"},
    {"nice", 3, "nice"},
    {"nice", 1, "that nobody else had"},
    {"happy", 6, "happy"},
    {"happy", 3, "glad"},
    {"happy", 2, "full of joy"},
    {"happy", 1, "excited"},
    {"jumped", 4, "jumped up and down"},
    {"jumped", 3, "clapped with both hands"},
    {"jumped", 2, "danced in a circle"},
    {"smiled", 3, "smiled"},
    {"smiled", 2, "looked away"},
    {"smiled", 1, "shrugged"},
    {"sound", 3, "strange"},
    {"sound", 2, "soft"},
    {"sound", 1, "loud"},
    {"shining", 5, "shining"},
    {"shining", 4, "warm"},
    {"shining", 3, "high in the sky"},
    {"shining", 1, "hidden behind a cloud"},
    {"walked", 6, "walked"},
    {"walked", 4, "ran"},
    {"walked", 2, "skipped"},
    {"road", 5, "road"},
    {"road", 3, "path"},
    {"road", 2, "fence"},
    {"road", 1, "stream"},
    {"sang", 6, "sang a song"},
    {"sang", 4, "whistled"},
    {"sang", 2, "hummed an old tune"},
    {"sang", 1, "made up a rhyme"},
    {"looked", 5, "looked"},
    {"looked", 3, "stared"},
    {"looked", 1, "winked"},
    {"softly", 4, "softly"},
    {"softly", 2, "hard"},
    {"softly", 1, "day and night"},
    {"where", 5, "on a branch"},
    {"where", 4, "in the shade"},
    {"where", 3, "on the fence"},
    {"where", 2, "by the water"},
    {"where", 1, "under an old oak"},
    {"thought", 5, "the sea"},
    {"thought", 4, "a faraway country"},
    {"thought", 3, "lunch"},
    {"thought", 3, "the stars"},
    {"thought", 2, "ships and pirates"},
    {"thought", 2, "a treasure"},
    {"thought", 1, "what the {+passer} had said"},
    {"mind", 4, "mind"},
    {"mind", 3, "care"},
    {"mind", 1, "stop"},
    {"man", 3, "man"},
    {"man", 3, "woman"},
    {"man", 1, "{+passer}"},
    {"played", 5, "played together"},
    {"played", 3, "ran around {place}"},
    {"played", 2, "told each other stories"},
    {"drink", 4, "warm milk"},
    {"drink", 3, "hot soup"},
    {"drink", 2, "{+snack.s} with honey"},
    {"trick", 3, "fly"},
    {"trick", 2, "sing"},
    {"trick", 1, "read and write"},
    {"good", 5, "good"},
    {"good", 3, "long"},
    {"good", 1, "wonderful"},
};
#define CORPUS_NUM_ROWS ((int)(sizeof(corpus_rows) / sizeof(corpus_rows[0])))

// ---------------------------------------------------------------------------------------------------------------------
// the grammar, compiled: every row becomes a row of items

#define CORPUS_MAX_ITEMS 4096
#define CORPUS_MAX_EXCLUDED 3

enum { ITEM_TEXT, ITEM_RULE, ITEM_CHOOSE, ITEM_SHOW, ITEM_SET, ITEM_END };

typedef struct {
    int kind;
    const char* text; // ITEM_TEXT: (length) the bytes to print
    int length;
    int rule;                          // ITEM_RULE
    int slot, form;                    // ITEM_CHOOSE, ITEM_SHOW, ITEM_SET
    int source;                        // ITEM_SET: the slot to copy
    int excluded[CORPUS_MAX_EXCLUDED]; // ITEM_CHOOSE: (num_excluded) slots that the new word must differ from
    int num_excluded;
} CorpusItem;

typedef struct {
    const char* name;
    int first_row, num_rows;
    uint32_t total_weight;
    double entropy; // nats, mean over its derivations
    double bytes;   // mean number of bytes printed
    int state;      // while the means are computed: 0 not yet, 1 being computed, 2 known
} CorpusRule;

typedef struct {
    CorpusItem items[CORPUS_MAX_ITEMS];
    int num_items;
    int row_items[CORPUS_NUM_ROWS]; // index of the first item of each row; a row ends in ITEM_END
    CorpusRule rules[CORPUS_NUM_ROWS];
    int num_rules;
    int slot_list[CORPUS_NUM_SLOTS]; // list of each slot
    int list_size[CORPUS_NUM_LISTS];
} CorpusGrammar;

// Print word number `word` of a list in a form: its bytes to `out` (room for 64), and how many they are.
static int corpus_print_word(char* out, int list, int word, int form) {
    const char* text = corpus_lists[list].words[word];
    int is_girl = word >= CORPUS_FIRST_GIRL;
    switch (form) {
    case FORM_A:
        return snprintf(out, 64, "%s %s", strchr("aeiou", text[0]) ? "an" : "a", text);
    case FORM_S:
        return snprintf(out, 64, "%ss", text);
    case FORM_HE:
        return snprintf(out, 64, "%s", is_girl ? "she" : "he");
    case FORM_HIM:
        return snprintf(out, 64, "%s", is_girl ? "her" : "him");
    case FORM_HIS:
        return snprintf(out, 64, "%s", is_girl ? "her" : "his");
    case FORM_CAPITAL_HE:
        return snprintf(out, 64, "%s", is_girl ? "She" : "He");
    case FORM_M1:
        return snprintf(out, 64, "%s", corpus_numbers[CORPUS_FIRST_NUMBER + word - 1]);
    case FORM_M2:
        return snprintf(out, 64, "%s", corpus_numbers[CORPUS_FIRST_NUMBER + word - 2]);
    case FORM_P1:
        return snprintf(out, 64, "%s", corpus_numbers[CORPUS_FIRST_NUMBER + word + 1]);
    default:
        return snprintf(out, 64, "%s", text);
    }
}

static int corpus_find_rule(const CorpusGrammar* g, const char* name, size_t length) {
    int rule = 0;
    while (rule < g->num_rules &&
           !(strlen(g->rules[rule].name) == length && memcmp(g->rules[rule].name, name, length) == 0)) {
        rule++;
    }
    check(rule < g->num_rules, "grammar: no rule '%.*s'", (int)length, name);
    return rule;
}

// The slot whose name starts at *p; *p moves behind it.
static int corpus_read_slot(const char** p) {
    size_t length = strspn(*p, "abcdefghijklmnopqrstuvwxyz0123456789");
    int slot = 0;
    while (slot < CORPUS_NUM_SLOTS &&
           !(strlen(corpus_slots[slot].name) == length && memcmp(corpus_slots[slot].name, *p, length) == 0)) {
        slot++;
    }
    check(slot < CORPUS_NUM_SLOTS, "grammar: no slot '%.*s'", (int)length, *p);
    *p += length;
    return slot;
}

// One {...}; *p stands behind the opening brace and moves behind the closing one.
static CorpusItem corpus_read_braces(const CorpusGrammar* g, const char** p) {
    CorpusItem item = {.kind = **p == '+' ? ITEM_CHOOSE : ITEM_SHOW};
    *p += **p == '+';
    item.slot = corpus_read_slot(p);
    const char* name = corpus_slots[item.slot].name;
    int list = g->slot_list[item.slot];
    if (**p == '=') {
        *p += 1;
        item.kind = ITEM_SET;
        item.source = corpus_read_slot(p);
        check(g->slot_list[item.source] == list, "grammar: '%s' is set from another list", name);
    }
    while (**p == '!') {
        *p += 1;
        check(item.kind == ITEM_CHOOSE && item.num_excluded < CORPUS_MAX_EXCLUDED,
              "grammar: a '!' too many before '%s'", *p);
        int other = corpus_read_slot(p);
        check(g->slot_list[other] == list, "grammar: '%s' excludes a word of another list", name);
        item.excluded[item.num_excluded++] = other;
    }
    if (**p == '.') {
        *p += 1;
        size_t length = strcspn(*p, "}");
        while (item.form < NUM_FORMS && !(strlen(corpus_form_names[item.form]) == length &&
                                          memcmp(corpus_form_names[item.form], *p, length) == 0)) {
            item.form++;
        }
        check(item.form < NUM_FORMS, "grammar: no form '%.*s'", (int)length, *p);
        *p += length;
    }
    int is_person = strcmp(corpus_lists[list].name, "person") == 0;
    int is_number = strcmp(corpus_lists[list].name, "number") == 0;
    check((item.form < FORM_HE || item.form > FORM_CAPITAL_HE || is_person) && (item.form < FORM_M1 || is_number),
          "grammar: '%s' has no form '%s'", name, corpus_form_names[item.form]);
    check(**p == '}', "grammar: want '}' at '%s'", *p);
    *p += 1;
    return item;
}

static void corpus_add_item(CorpusGrammar* g, CorpusItem item) {
    check(g->num_items < CORPUS_MAX_ITEMS, "grammar: more than %d items", CORPUS_MAX_ITEMS);
    g->items[g->num_items++] = item;
}

// Compile the tables above. Dies on a row that means nothing; whether it is ambiguous is for corpus_check_grammar.
static void corpus_compile(CorpusGrammar* g) {
    memset(g, 0, sizeof(*g));
    for (int list = 0; list < CORPUS_NUM_LISTS; list++) {
        while (g->list_size[list] < CORPUS_MAX_WORDS && corpus_lists[list].words[g->list_size[list]] != NULL) {
            g->list_size[list]++;
        }
    }
    for (int slot = 0; slot < CORPUS_NUM_SLOTS; slot++) {
        int list = 0;
        while (list < CORPUS_NUM_LISTS && strcmp(corpus_slots[slot].list, corpus_lists[list].name) != 0) {
            list++;
        }
        check(list < CORPUS_NUM_LISTS, "grammar: no list '%s'", corpus_slots[slot].list);
        g->slot_list[slot] = list;
    }
    for (int row = 0; row < CORPUS_NUM_ROWS; row++) {
        const char* name = corpus_rows[row].rule;
        if (row == 0 || strcmp(name, corpus_rows[row - 1].rule) != 0) {
            for (int i = 0; i < g->num_rules; i++) {
                check(strcmp(name, g->rules[i].name) != 0, "grammar: the rows of '%s' are not together", name);
            }
            g->rules[g->num_rules++] = (CorpusRule){.name = name, .first_row = row};
        }
        check(corpus_rows[row].weight > 0, "grammar: weight %d in '%s', want 1 or more", corpus_rows[row].weight, name);
        g->rules[g->num_rules - 1].num_rows++;
        g->rules[g->num_rules - 1].total_weight += (uint32_t)corpus_rows[row].weight;
    }
    for (int row = 0; row < CORPUS_NUM_ROWS; row++) {
        g->row_items[row] = g->num_items;
        for (const char* p = corpus_rows[row].text; *p;) {
            if (*p == '[') {
                size_t length = strcspn(++p, "]");
                corpus_add_item(g, (CorpusItem){.kind = ITEM_RULE, .rule = corpus_find_rule(g, p, length)});
                p += length + 1;
            } else if (*p == '{') {
                p++;
                corpus_add_item(g, corpus_read_braces(g, &p));
            } else {
                size_t length = strcspn(p, "[{");
                corpus_add_item(g, (CorpusItem){.kind = ITEM_TEXT, .text = p, .length = (int)length});
                p += length;
            }
        }
        corpus_add_item(g, (CorpusItem){.kind = ITEM_END});
    }
}

// Mean bytes of a slot of this list in a form: all words are equally likely wherever it is printed (see the top).
static double corpus_mean_bytes(const CorpusGrammar* g, int list, int form) {
    char word[64];
    int sum = 0;
    for (int i = 0; i < g->list_size[list]; i++) {
        sum += corpus_print_word(word, list, i, form);
    }
    return (double)sum / g->list_size[list];
}

// Fill in entropy and bytes of a rule and of all that it uses. A rule that used itself would need a linear system; none
// does, and it is an error.
static void corpus_compute_means(CorpusGrammar* g, int rule) {
    CorpusRule* r = &g->rules[rule];
    check(r->state != 1, "grammar: rule '%s' uses itself", r->name);
    if (r->state == 2) { return; }
    r->state = 1;
    for (int row = r->first_row; row < r->first_row + r->num_rows; row++) {
        double p = corpus_rows[row].weight / (double)r->total_weight;
        double entropy = -log(p), bytes = 0;
        for (const CorpusItem* item = &g->items[g->row_items[row]]; item->kind != ITEM_END; item++) {
            if (item->kind == ITEM_TEXT) {
                bytes += item->length;
            } else if (item->kind == ITEM_RULE) {
                corpus_compute_means(g, item->rule);
                entropy += g->rules[item->rule].entropy;
                bytes += g->rules[item->rule].bytes;
            } else if (item->kind != ITEM_SET) {
                int list = g->slot_list[item->slot];
                bytes += corpus_mean_bytes(g, list, item->form);
                entropy += item->kind == ITEM_CHOOSE ? log(g->list_size[list] - item->num_excluded) : 0;
            }
        }
        r->entropy += p * entropy;
        r->bytes += p * bytes;
    }
    r->state = 2;
}

// The floor, in nats per byte-level token; see the top of this file. Wants corpus_compute_means(g, 0).
static double corpus_entropy_per_token(const CorpusGrammar* g) {
    return g->rules[0].entropy / (g->rules[0].bytes + 1);
}

// ---------------------------------------------------------------------------------------------------------------------
// the proof that the grammar is unambiguous
//
// Claim: the texts of every rule are a prefix code (none is a prefix of another, none has two derivations), so that a
// story can be read from left to right in one way only. By induction over the rules it is enough that
// - in every list, in every form in which its words are CHOSEN, no printed word is a prefix of another;
// - any two alternatives of a rule come to different bytes while both still go on: they share their first items, and
//   behind these their possible next bytes are disjoint sets. Allowed, too: a word chosen to be different from a
//   slot's, against that slot printed.

typedef struct {
    uint8_t has[256];
} CorpusByteSet;

// Add all bytes that the items from `item` on can start with.
static void corpus_first_bytes(const CorpusGrammar* g, const CorpusItem* item, CorpusByteSet* set) {
    while (item->kind == ITEM_SET) {
        item++;
    }
    check(item->kind != ITEM_END, "grammar: an alternative that prints nothing");
    if (item->kind == ITEM_TEXT) {
        set->has[(uint8_t)item->text[0]] = 1;
    } else if (item->kind == ITEM_RULE) {
        const CorpusRule* r = &g->rules[item->rule];
        for (int row = r->first_row; row < r->first_row + r->num_rows; row++) {
            corpus_first_bytes(g, &g->items[g->row_items[row]], set);
        }
    } else {
        char word[64];
        for (int i = 0; i < g->list_size[g->slot_list[item->slot]]; i++) {
            corpus_print_word(word, g->slot_list[item->slot], i, item->form);
            set->has[(uint8_t)word[0]] = 1;
        }
    }
}

// Do two items that are no text say the same, so that both alternatives read them in the same way?
static int corpus_same_item(const CorpusItem* a, const CorpusItem* b) {
    int same = a->kind == b->kind && a->kind != ITEM_TEXT && a->rule == b->rule && a->slot == b->slot &&
               a->form == b->form && a->source == b->source && a->num_excluded == b->num_excluded;
    for (int i = 0; same && i < a->num_excluded; i++) {
        same = a->excluded[i] == b->excluded[i];
    }
    return same;
}

// Is `chosen` a new word that cannot be the one that `shown` prints?
static int corpus_differs_by_choice(const CorpusItem* chosen, const CorpusItem* shown) {
    int excluded = 0;
    for (int i = 0; i < chosen->num_excluded; i++) {
        excluded |= chosen->excluded[i] == shown->slot;
    }
    return excluded && chosen->kind == ITEM_CHOOSE && shown->kind == ITEM_SHOW && chosen->form == FORM_PLAIN &&
           shown->form == FORM_PLAIN;
}

// Do two rows of one rule come to different bytes while both go on?
static int corpus_rows_differ(const CorpusGrammar* g, int row_a, int row_b) {
    CorpusItem a = g->items[g->row_items[row_a]], b = g->items[g->row_items[row_b]]; // text: what is left of it
    const CorpusItem *next_a = &g->items[g->row_items[row_a]] + 1, *next_b = &g->items[g->row_items[row_b]] + 1;
    while (a.kind != ITEM_END && b.kind != ITEM_END) {
        if (a.kind == ITEM_TEXT && b.kind == ITEM_TEXT) {
            int n = a.length < b.length ? a.length : b.length;
            if (memcmp(a.text, b.text, (size_t)n) != 0) { return 1; }
            a.text += n;
            b.text += n;
            a.length -= n;
            b.length -= n;
            a = a.length > 0 ? a : *next_a++;
            b = b.length > 0 ? b : *next_b++;
        } else if (corpus_same_item(&a, &b)) {
            a = *next_a++;
            b = *next_b++;
        } else if (a.kind == ITEM_SET || b.kind == ITEM_SET) {
            return 0; // they mean different things already, and no byte has said so
        } else {
            CorpusByteSet set_a = {{0}}, set_b = {{0}};
            corpus_first_bytes(g, &a, &set_a); // neither is a SET or END: only the item itself is looked at
            corpus_first_bytes(g, &b, &set_b);
            int overlap = 0;
            for (int i = 0; i < 256; i++) {
                overlap |= set_a.has[i] && set_b.has[i];
            }
            return !overlap || corpus_differs_by_choice(&a, &b) || corpus_differs_by_choice(&b, &a);
        }
    }
    return 0; // one is a prefix of the other
}

// Dies with the first place where the grammar is ambiguous, or might be.
static void corpus_check_grammar(const CorpusGrammar* g) {
    char a[64], b[64];
    for (int i = 0; i < g->num_items; i++) {
        const CorpusItem* item = &g->items[i];
        int list = item->kind == ITEM_CHOOSE ? g->slot_list[item->slot] : -1;
        for (int w = 0; list >= 0 && w < g->list_size[list]; w++) {
            int n = corpus_print_word(a, list, w, item->form);
            for (int v = 0; v < g->list_size[list]; v++) {
                corpus_print_word(b, list, v, item->form);
                check(v == w || strncmp(a, b, (size_t)n) != 0, "grammar: '%s' is a prefix of '%s' in list '%s'", a, b,
                      corpus_lists[list].name);
            }
        }
    }
    for (int r = 0; r < g->num_rules; r++) {
        int first = g->rules[r].first_row, end = first + g->rules[r].num_rows;
        for (int row = first; row < end; row++) {
            for (int other = row + 1; other < end; other++) {
                check(corpus_rows_differ(g, row, other), "grammar: rule '%s' cannot tell its alternatives %d and %d",
                      g->rules[r].name, row - first + 1, other - first + 1);
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// writing stories

// Counter-based random numbers: draw k of story s of stream t is a function of (seed, t, s, k) and of nothing else.
typedef struct {
    uint64_t key, counter;
} CorpusRandom;

// A permutation of 64 bits that mixes well (SplitMix64's output function, Steele, Lea, Flood 2014).
static uint64_t corpus_mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static CorpusRandom corpus_random(uint64_t seed, uint64_t stream, uint64_t story) {
    return (CorpusRandom){corpus_mix(corpus_mix(corpus_mix(seed + 1) + stream) + story), 0};
}

// Uniform in [0, n), exactly: of the 2^32 values the last 2^32 mod n are drawn again.
static uint32_t corpus_draw(CorpusRandom* r, uint32_t n) {
    uint32_t last = UINT32_MAX - (uint32_t)(((uint64_t)1 << 32) % n), value;
    do {
        value = (uint32_t)(corpus_mix(r->key + ++r->counter * 0x9e3779b97f4a7c15u) >> 32);
    } while (value > last);
    return value % n;
}

typedef struct {
    const CorpusGrammar* g;
    CorpusRandom random;
    int word[CORPUS_NUM_SLOTS]; // -1: not chosen yet
    double information;         // -ln(probability) of the choices so far; only the tests read it
    char* text;                 // (capacity)
    size_t length, capacity;
} CorpusStory;

static void corpus_append(CorpusStory* s, const char* text, size_t n) {
    if (s->length + n > s->capacity) {
        s->capacity = 2 * (s->length + n) + 4096;
        s->text = realloc(s->text, s->capacity);
        check(s->text != NULL, "out of host memory: wanted %zu bytes", s->capacity);
    }
    memcpy(s->text + s->length, text, n);
    s->length += n;
}

// Choose a word for a slot: uniform among those that the excluded slots do not have.
static void corpus_choose(CorpusStory* s, const CorpusItem* item) {
    int size = s->g->list_size[s->g->slot_list[item->slot]], taken[CORPUS_MAX_WORDS] = {0};
    for (int i = 0; i < item->num_excluded; i++) { // the entropy counts on that many different words
        int word = s->word[item->excluded[i]];
        check(word >= 0 && !taken[word], "grammar: '%s' excludes '%s', which is not chosen yet or excluded twice",
              corpus_slots[item->slot].name, corpus_slots[item->excluded[i]].name);
        taken[word] = 1;
    }
    uint32_t rank = corpus_draw(&s->random, (uint32_t)(size - item->num_excluded));
    int word = 0;
    while (taken[word] || rank-- > 0) {
        word++;
    }
    s->word[item->slot] = word;
    s->information += log(size - item->num_excluded);
}

// Write one derivation of a rule.
static void corpus_expand(CorpusStory* s, int rule) {
    const CorpusGrammar* g = s->g;
    const CorpusRule* r = &g->rules[rule];
    uint32_t at = corpus_draw(&s->random, r->total_weight);
    int row = r->first_row;
    for (; at >= (uint32_t)corpus_rows[row].weight; row++) {
        at -= (uint32_t)corpus_rows[row].weight;
    }
    s->information += log(r->total_weight / (double)corpus_rows[row].weight);
    for (const CorpusItem* item = &g->items[g->row_items[row]]; item->kind != ITEM_END; item++) {
        if (item->kind == ITEM_TEXT) {
            corpus_append(s, item->text, (size_t)item->length);
        } else if (item->kind == ITEM_RULE) {
            corpus_expand(s, item->rule);
        } else if (item->kind == ITEM_SET) {
            check(s->word[item->source] >= 0, "grammar: '%s' is used before it is chosen",
                  corpus_slots[item->source].name);
            s->word[item->slot] = s->word[item->source];
        } else {
            if (item->kind == ITEM_CHOOSE) { corpus_choose(s, item); }
            check(s->word[item->slot] >= 0, "grammar: '%s' is printed before it is chosen",
                  corpus_slots[item->slot].name);
            char word[64];
            int length = corpus_print_word(word, g->slot_list[item->slot], s->word[item->slot], item->form);
            corpus_append(s, word, (size_t)length);
        }
    }
}

// Append story number `index` of a stream to s->text.
static void corpus_write_story(CorpusStory* s, uint64_t seed, uint64_t stream, uint64_t index) {
    s->random = corpus_random(seed, stream, index);
    memset(s->word, 0xff, sizeof(s->word));
    corpus_expand(s, 0);
}

enum { CORPUS_TRAIN_STREAM, CORPUS_VAL_STREAM };

// Write stories of a stream, each followed by the separator, until the file has at least `bytes`. Returns its size.
static int64_t corpus_write_file(const CorpusGrammar* g, const char* path, int64_t bytes, uint64_t seed,
                                 uint64_t stream, int64_t* num_stories) {
    size_t size = strlen(path) + sizeof(".tmp");
    char* tmp = malloc_or_die(size);
    snprintf(tmp, size, "%s.tmp", path);
    FILE* f = fopen_or_die(tmp, "wb");
    CorpusStory s = {.g = g};
    int64_t written = 0;
    *num_stories = 0;
    while (written < bytes) {
        s.length = 0;
        corpus_write_story(&s, seed, stream, (uint64_t)(*num_stories)++);
        corpus_append(&s, CORPUS_SEPARATOR, sizeof(CORPUS_SEPARATOR) - 1);
        fwrite_or_die(s.text, s.length, f, tmp);
        written += (int64_t)s.length;
    }
    fclose_or_die(f, tmp);
    check(rename(tmp, path) == 0, "cannot rename '%s' to '%s': %s", tmp, path, strerror(errno));
    free(s.text);
    free(tmp);
    return written;
}

// ---------------------------------------------------------------------------------------------------------------------
// the program

static const char* corpus_usage =
    "data/make_corpus --bytes N -o FILE [--seed S] [--val-bytes M --val-output FILE]\n"
    "data/make_corpus --print-entropy\n"
    "Writes simple English stories from a grammar, <|endoftext|> lines between them, as data/tokenize wants them.\n\n"
    "  --bytes N          size of the text; the story that reaches N is the last\n"
    "  -o FILE            where it goes\n"
    "  --seed S           0 to 18446744073709551615 (default 1); one seed gives the same bytes on every machine\n"
    "  --val-bytes M      size of a validation text of other stories\n"
    "  --val-output FILE  where that goes\n"
    "  --print-entropy    only print the loss of a perfect model, in nats per byte-level token\n";

typedef struct {
    int64_t bytes, val_bytes; // 0: not asked for
    uint64_t seed;
    const char *output, *val_output;
    int print_entropy;
} CorpusOptions;

static uint64_t corpus_number(const char* flag, const char* text, uint64_t low, uint64_t high) {
    char* end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    check(text[0] >= '0' && text[0] <= '9' && *end == 0 && errno == 0 && value >= low && value <= high,
          "%s: '%s', want a whole number from %llu to %llu", flag, text, (unsigned long long)low,
          (unsigned long long)high);
    return value;
}

static CorpusOptions corpus_parse(int argc, char** argv) {
    CorpusOptions o = {.seed = 1};
    for (int i = 1; i < argc; i++) {
        const char* flag = argv[i];
        if (strcmp(flag, "--print-entropy") == 0) {
            check(argc == 2, "--print-entropy: %d more arguments, want none", argc - 2);
            o.print_entropy = 1;
            return o;
        }
        int known = strcmp(flag, "--bytes") == 0 || strcmp(flag, "--seed") == 0 || strcmp(flag, "-o") == 0 ||
                    strcmp(flag, "--val-bytes") == 0 || strcmp(flag, "--val-output") == 0;
        check(known, "unknown argument '%s' (see data/make_corpus --help)", flag);
        check(i + 1 < argc, "%s: no value given", flag);
        const char* value = argv[++i];
        if (strcmp(flag, "--bytes") == 0) {
            o.bytes = (int64_t)corpus_number(flag, value, 1, (uint64_t)1 << 50);
        } else if (strcmp(flag, "--val-bytes") == 0) {
            o.val_bytes = (int64_t)corpus_number(flag, value, 1, (uint64_t)1 << 50);
        } else if (strcmp(flag, "--seed") == 0) {
            o.seed = corpus_number(flag, value, 0, UINT64_MAX);
        } else if (strcmp(flag, "-o") == 0) {
            o.output = value;
        } else {
            o.val_output = value;
        }
    }
    check(o.bytes > 0 && o.output != NULL,
          "nothing to write: want --bytes N and -o FILE (see data/make_corpus --help)");
    check((o.val_bytes > 0) == (o.val_output != NULL), "--val-bytes and --val-output: want both or none");
    check(o.val_output == NULL || strcmp(o.output, o.val_output) != 0, "-o and --val-output are both '%s'", o.output);
    return o;
}

// The whole program; the tests call it, too.
static int corpus_main(int argc, char** argv) {
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            printf("%s", corpus_usage);
            return 0;
        }
    }
    CorpusOptions o = corpus_parse(argc, argv);
    CorpusGrammar* g = malloc_or_die(sizeof(CorpusGrammar));
    corpus_compile(g);
    corpus_check_grammar(g);
    corpus_compute_means(g, 0);
    double floor = corpus_entropy_per_token(g);
    if (o.print_entropy) {
        printf("%.9f\n", floor);
    } else {
        int64_t stories, size = corpus_write_file(g, o.output, o.bytes, o.seed, CORPUS_TRAIN_STREAM, &stories);
        printf("%s: %lld stories, %lld bytes\n", o.output, (long long)stories, (long long)size);
        if (o.val_output != NULL) {
            size = corpus_write_file(g, o.val_output, o.val_bytes, o.seed, CORPUS_VAL_STREAM, &stories);
            printf("%s: %lld stories, %lld bytes\n", o.val_output, (long long)stories, (long long)size);
        }
        printf("entropy of the grammar: %.3f nats per story of %.3f bytes on average; a perfect byte-level model's "
               "loss is "
               "%.6f nats per token (%.4f bits)\n",
               g->rules[0].entropy, g->rules[0].bytes, floor, floor / log(2.0));
    }
    free(g);
    return 0;
}

#ifndef TESTING // test_corpus.c includes this file
int main(int argc, char** argv) {
    return corpus_main(argc, argv);
}
#endif
