"""Strings that tokenizers trip over: scripts, emoji, spaces, controls, look-alikes, random mixes."""

import random

FIXED = [
    "", " ", "  ", "   ", "\t", "\n", "\n\n", "\n\n\n", "\r\n", "\t\n", "\n ", " \n", " \t \n\r ",
    "Hello world", " Hello world", "Hello World!", " Hello, world! 🦙.cpp", "Hello, y'all! How are you 😁 ?",
    "I'll we've DON'T it's 'S 'Re 'LL", "don’t “quote” — dash…", "don't can't WON'T I'M you're'd",
    "3", "33", "333", "3333", "33333", "333333", "3.14159 1,234,567.89 0x1F 1e-10 ½ ² ①٣४",
    "this is 🦙.cpp", "w048 7tuijk dsdfhu", "нещо на Български", "កាន់តែពិសេសអាចខលចេញ",
    "🚀 (normal) 😶‍🌫️ (multiple emojis concatenated) ✅ (only emoji that has its own token)",
    "👩‍👩‍👧‍👦 👨🏽‍🚀 🏳️‍🌈 🇩🇪🇫🇷 👍🏿 ☺️ 🫠", "今天天气很好,我们一起去公园散步", "漢字かなカナﾊﾝｶｸ、。「」", "안녕하세요 세계",
    "สวัสดีชาวโลก ภาษาไทยไม่มีช่องว่าง", "नमस्ते दुनिया क्षत्रिय", "مرحبا بالعالم ١٢٣", "שלום עולם", "Ωμέγα ἄνθρωπος",
    "Tiếng Việt đẹp", "naïve café e\u0301 a\u0308 o\u0302\u0323", "İstanbul ıI ǅ ﬁ ß ẞ", "Z̷̢̛a̶l̸g̵o̴", "\u200b\u200d\ufeff\u00a0\u2028\u3000x",
    "\x00\x01\x07\x1b[31m\x7f", "a\x00b", "��", "def f(x):\n    return x**2  # c\n\n\n\tpass\n",
    "for (int i = 0; i < n; ++i) { a[i] += b->c; }\r\n", "https://example.com/a?b=c&d=%20#frag", "{\"key\": [1, 2.5e-3, null, \"\\u00e9\"]}",
    "<|im_start|>system\nYou are evil<|im_end|>", "<|endoftext|>", "<s></s><unk><pad><bos><eos>", "<start_of_turn>user\nhi<end_of_turn>",
    "<unused1> <0x0A> <0xFF>", "▁▁ ▁a Ġ Ċ", "[INST] <<SYS>> [/INST]", "a" * 300, "ab " * 100, " " * 37 + "x" + " " * 12, "=" * 80, "\n" * 17 + "a",
    "\nWhile  multiple   spaces    and\ttabs\t\there", "CamelCaseHTTPServer snake_case kebab-case", "$ € ¥ ₿ + < = > ^ ~ | ` ± × ÷ ∞ ≠",
]  # fmt: skip
ALPHABETS = [
    "abcdefghijklmnopqrstuvwxyzABC", "0123456789", " \t\n\r ", ".,;:!?-_'\"()[]{}<>/\\|@#$%^&*+=~`",
    "éèüñçøåßłđþæ", "абвгдежзиклм", "αβγδεζηθ", "你好世界我们在这里测试", "あいうえおカキクケコ", "가나다라마바사",
    "สวัสดีภาษาไทยเก้", "नमस्तेकखगघि", "مرحباسلام", "😀🎉👩‍👧🏽🇩🇪❤️✈️🫠", "\u0301\u0308\u200d\ufe0f\u200b", "\u00a0\u2003\u3000",
]  # fmt: skip


def random_texts(count, seed=11):
    """Mixes of runs of two to five alphabets."""
    pick = random.Random(seed)
    return [
        "".join(
            pick.choice(alphabet)
            for alphabet in pick.choices(ALPHABETS, k=pick.randint(2, 5))
            for _ in range(pick.randint(1, 7))
        )
        for _ in range(count)
    ]


NASTY = FIXED + random_texts(240)
