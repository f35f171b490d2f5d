"""Answers as models write them, and the number that each one is; None if it is no answer."""

from fractions import Fraction

HALF = Fraction(1, 2)

NUMBERS = {
    # plain, signs
    "18": 18, "18.": 18, "18.0": 18, " 18 ": 18, "018": 18, "0": 0, "-0": 0,
    "3.14": Fraction(157, 50), "+18": 18, "-18": -18, "−18": -18, "- 18": -18,
    "–18": -18, "minus 18": -18, "negative 18": -18,
    ".5": HALF, "0.5": HALF, "-0.5": -HALF,
    # currency, units, words
    "$18": 18, "$18.00": 18, "-$18": -18, "$ 18": 18, "€18": 18, "¥18": 18,
    "£18.50": Fraction(37, 2), "18 USD": 18, "USD 18": 18, "18¢": 18, "$18 per day": 18,
    "18 dollars": 18, "18 apples.": 18, "18%": 18, "18 %": 18, "18 km/h": 18, "18kg": 18,
    "18 m2": 18, "18 m^2": 18, "18°": 18, "18 apples and no pears": 18, "is 18": 18,
    "about 18": 18, "18 (eighteen)": 18,
    "eighteen (18)": 18, "18 or 18": 18, "18!": 18, "18 more than Bob": 18,
    # groups of digits
    "1,234": 1234, "1,234,567": 1234567, "$1,234.50": Fraction(2469, 2), "1234": 1234,
    "100,000": 100000, "1,234.": 1234, "1 234": 1234, "18 000": 18000, "12 345 678": 12345678,
    "1\u202f234": 1234, "1_234": 1234, "1{,}234": 1234, r"1\,234": 1234,
    # fractions
    "1/2": HALF, "1 / 2": HALF, "36/2": 18, "5/2 hours": Fraction(5, 2), "2 1/2": Fraction(5, 2),
    r"\frac{1}{2}": HALF, r"\dfrac{36}{2}": 18, r"\tfrac{1}{2}": HALF, r"\frac12": HALF,
    r"-\frac{1}{2}": -HALF, r"2\frac{1}{2}": Fraction(5, 2),
    # marks around it
    "**18**": 18, "`18`": 18, "$18$": 18, "$$18$$": 18, r"\(18\)": 18, r"\[18\]": 18, "(18)": 18,
    "[18]": 18, "{18}": 18, '"18"': 18, "<b>18</b>": 18, "18,": 18, "18;": 18, "#18": 18,
    r"\boxed{18}": 18, r"\$18": 18, r"18\%": 18, r"18\text{ cm}": 18, r"\text{18}": 18,
    r"\textbf{18}": 18, r"18^\circ": 18,
    # results of a calculation
    "**18** and **18**": 18, "18 dollars: 18": 18, "18 double rooms": 18, "18 x": 18,
    "= 18": 18, "x = 18": 18, "9 * 2 = 18": 18, "3 + 15 = $18": 18, r"9 \times 2 = 18": 18,
}  # fmt: skip

NO_ANSWERS = [
    # no number, or not one that stands there
    "eighteen", "", "-", ".", "$", "1/0", "9" * 200, "18 million", "18½", r"18\pi", r"\sqrt{324}",
    "not 18", "it isn't 18", "18 trillion", "18k", "18²", "> 18", "≥ 18", "more than 18",
    # several numbers
    "12 or 13", "12, 13", "18 of 20", "18 to 20", "18-20", "between 12 and 18", "18 > 17",
    "18 h 30 min", "18:30", "18; no, 17", "1,2,3", "1,23", "1.234,50",
    # a calculation without its result
    "3 + 4", "10 + 8 apples", "36 = 2 * 18", "10^2",
    # Formulas whose numbers are equal, and another value than that of the number.
    "9 + 9", "9 - 9", "9 * 9", "9 ** 9", "9 x $9", r"9 \times 9", r"9 \cdot 9", "9 ÷ 9", "9:9",
    "9 apples + 9 apples", "9 mod 9", "twice 9", "half of 36", "18 and a half",
]  # fmt: skip

WRITTEN: dict[str, Fraction | int | None] = {**NUMBERS, **dict.fromkeys(NO_ANSWERS)}
