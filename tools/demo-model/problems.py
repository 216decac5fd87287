"""School mathematics with worked solutions, made from templates: the larger part of the corpus's mathematics."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from random import Random

NAMES = ["Ada", "Bela", "Carla", "Dinesh", "Emil", "Fatima", "Goran", "Hana", "Ivo", "Julia", "Kofi", "Lena", "Marek", "Nora", "Omar", "Petra"]
THINGS = ["apples", "stamps", "marbles", "pencils", "shells", "tickets", "postcards", "beads"]


def _number(x: Fraction | int) -> str:
    x = Fraction(x)
    return str(x.numerator) if x.denominator == 1 else f"\\frac{{{x.numerator}}}{{{x.denominator}}}"


def _plus(x: int, unit: str = "") -> str:
    return f"{'+' if x >= 0 else '-'} {abs(x)}{unit}"


def _worked(question: str, solution: str, answer: object) -> str:
    return f"Problem: {question}\nSolution: {solution}\nAnswer: $\\boxed{{{answer}}}$"


def _linear(r: Random) -> str:
    a, x, b = r.randint(2, 19), r.randint(-25, 25), r.randint(-50, 50)
    c = a * x + b
    return _worked(
        f"Solve ${a}x {_plus(b)} = {c}$ for $x$.",
        f"Move the constant to the right-hand side: ${a}x = {c} {_plus(-b)} = {c - b}$. Divide by ${a}$ to obtain $x = {x}$.",
        x,
    )


def _quadratic(r: Random) -> str:
    p, q = sorted((r.randint(-11, 11), r.randint(-11, 11)))
    b, c = -(p + q), p * q
    return _worked(
        f"Solve the quadratic equation $x^2 {_plus(b, 'x')} {_plus(c)} = 0$.",
        f"The discriminant is $\\Delta = ({b})^2 - 4 \\cdot ({c}) = {b * b - 4 * c}$, so $\\sqrt{{\\Delta}} = {q - p}$. "
        f"Hence $x = \\frac{{{-b} \\pm {q - p}}}{{2}}$, which gives $x_1 = {p}$ and $x_2 = {q}$.",
        f"x \\in \\{{{p}, {q}\\}}",
    )


def _story(r: Random) -> str:
    (one, two), thing = r.sample(NAMES, 2), r.choice(THINGS)
    a, k = r.randint(6, 70), r.randint(2, 5)
    b = r.randint(2, a)
    return _worked(
        f"{one} has {a} {thing}. {two} has {k} times as many {thing} and then gives {b} of them away. How many {thing} do they have together?",
        f"At first {two} has ${k} \\cdot {a} = {k * a}$ {thing}. After giving away {b}, there are ${k * a} - {b} = {k * a - b}$ left. "
        f"Together they have ${a} + {k * a - b} = {a + k * a - b}$ {thing}.",
        a + k * a - b,
    )


def _fractions(r: Random) -> str:
    a, b = (Fraction(r.randint(1, 14), r.randint(2, 14)) for _ in range(2))
    sign, total = r.choice([("+", a + b), ("-", a - b)])
    common = math.lcm(a.denominator, b.denominator)
    left, right = a.numerator * common // a.denominator, b.numerator * common // b.denominator
    return _worked(
        f"Compute ${_number(a)} {sign} {_number(b)}$.",
        f"The least common denominator is ${common}$. Therefore ${_number(a)} {sign} {_number(b)} = "
        f"\\frac{{{left} {sign} {right}}}{{{common}}} = {_number(total)}$.",
        _number(total),
    )


def _derivative(r: Random) -> str:
    n, a, c, x = r.randint(2, 6), r.randint(2, 9), r.randint(1, 12), r.randint(1, 4)
    value = a * n * x ** (n - 1) + c
    return _worked(
        f"Let $f(x) = {a}x^{{{n}}} {_plus(c, 'x')}$. Find $f'({x})$.",
        f"The power rule gives $f'(x) = {a * n}x^{{{n - 1}}} + {c}$. Substituting $x = {x}$, "
        f"$f'({x}) = {a * n} \\cdot {x ** (n - 1)} + {c} = {value}$.",
        value,
    )


def _integral(r: Random) -> str:
    n, u = r.randint(1, 5), r.randint(1, 5)
    k = r.randint(1, 7)
    a = k * (n + 1)
    return _worked(
        f"Evaluate $\\int_0^{{{u}}} {a}x^{{{n}}} \\, dx$.",
        f"An antiderivative of the integrand is $F(x) = {k}x^{{{n + 1}}}$. "
        f"Therefore the integral equals $F({u}) - F(0) = {k} \\cdot {u ** (n + 1)} = {k * u ** (n + 1)}$.",
        k * u ** (n + 1),
    )


def _product(r: Random) -> str:
    a, b = r.randint(11, 99), r.randint(11, 99)
    tens, ones = b // 10 * 10, b % 10
    return _worked(
        f"Compute ${a} \\times {b}$.",
        f"Split the second factor: ${b} = {tens} + {ones}$. Then ${a} \\times {tens} = {a * tens}$ and ${a} \\times {ones} = {a * ones}$, "
        f"and the sum is ${a * tens} + {a * ones} = {a * b}$.",
        a * b,
    )


def _system(r: Random) -> str:
    x, y = r.randint(-9, 9), r.randint(-9, 9)
    a, b, c, d = r.randint(1, 7), r.randint(1, 7), r.randint(1, 7), -r.randint(1, 7)
    s, t, det = a * x + b * y, c * x + d * y, a * d - b * c
    return _worked(
        f"Solve the system $\\begin{{cases}} {a}x {_plus(b, 'y')} = {s} \\\\ {c}x {_plus(d, 'y')} = {t} \\end{{cases}}$.",
        f"The determinant is $D = {a} \\cdot ({d}) - {b} \\cdot {c} = {det}$. By Cramer's rule "
        f"$x = \\frac{{{s * d - b * t}}}{{{det}}} = {x}$ and $y = \\frac{{{a * t - c * s}}}{{{det}}} = {y}$.",
        f"({x}, {y})",
    )


def _arithmetic_series(r: Random) -> str:
    a, d, n = r.randint(1, 20), r.randint(1, 9), r.randint(5, 40)
    last = a + (n - 1) * d
    return _worked(
        f"Find the sum of the first {n} terms of the arithmetic sequence ${a}, {a + d}, {a + 2 * d}, \\dots$",
        f"The common difference is ${d}$, so the last term is ${a} + {n - 1} \\cdot {d} = {last}$. "
        f"The sum is $\\frac{{{n}}}{{2}} ({a} + {last}) = {_number(Fraction(n * (a + last), 2))}$.",
        _number(Fraction(n * (a + last), 2)),
    )


def _geometric_series(r: Random) -> str:
    a, q, n = r.randint(1, 9), r.randint(2, 4), r.randint(3, 6)
    total = a * (q**n - 1) // (q - 1)
    return _worked(
        f"A geometric sequence starts with ${a}$ and has ratio ${q}$. What is the sum of its first {n} terms?",
        f"With $S_n = a \\cdot \\frac{{q^n - 1}}{{q - 1}}$ we obtain $S_{{{n}}} = {a} \\cdot \\frac{{{q**n} - 1}}{{{q - 1}}} = {total}$.",
        total,
    )


def _percent(r: Random) -> str:
    p, price, thing = r.randint(5, 95), 20 * r.randint(2, 60), r.choice(["coat", "bicycle", "lamp", "table", "radio"])
    off = Fraction(p * price, 100)
    return _worked(
        f"A {thing} costs {price} euros and is sold at a discount of {p}\\%. What does it cost now?",
        f"The discount is $\\frac{{{p}}}{{100}} \\cdot {price} = {_number(off)}$ euros, so the new price is ${price} - {_number(off)} = {_number(price - off)}$ euros.",
        _number(price - off),
    )


def _euclid(r: Random) -> str:
    a, b = sorted((r.randint(12, 500), r.randint(12, 500)), reverse=True)
    x, y, steps = a, b, []
    while y:
        steps.append(f"${x} = {x // y} \\cdot {y} + {x % y}$")
        x, y = y, x % y
    return _worked(
        f"Find the greatest common divisor of ${a}$ and ${b}$.",
        f"Apply the Euclidean algorithm: {', '.join(steps)}. The last remainder that is not zero is ${x}$.",
        x,
    )


def _speed(r: Random) -> str:
    name, hours, speeds = r.choice(NAMES), (r.randint(1, 9), r.randint(1, 9)), (r.randint(20, 120), r.randint(20, 120))
    way = hours[0] * speeds[0] + hours[1] * speeds[1]
    mean = _number(Fraction(way, sum(hours)))
    return _worked(
        f"{name} drives {hours[0]} hours at {speeds[0]} km/h and then {hours[1]} hours at {speeds[1]} km/h. What is the average speed?",
        f"The distance is ${hours[0]} \\cdot {speeds[0]} + {hours[1]} \\cdot {speeds[1]} = {way}$ km and the time is {sum(hours)} hours. "
        f"The average speed is $\\frac{{{way}}}{{{sum(hours)}}} = {mean}$ km/h.",
        mean,
    )


def _choose(r: Random) -> str:
    n, k = r.randint(4, 14), r.randint(2, 4)
    return _worked(
        f"In how many ways can a committee of {k} be chosen from {n} people?",
        f"The order does not matter, so the number is $\\binom{{{n}}}{{{k}}} = \\frac{{{n}!}}{{{k}! \\cdot {n - k}!}} = {math.comb(n, k)}$.",
        math.comb(n, k),
    )


def _expand(r: Random) -> str:
    a, b, c, d = r.randint(2, 9), r.randint(2, 9), r.randint(-9, 9), r.randint(-9, 9)
    answer = f"{a * b}x^2 {_plus(a * d + b * c, 'x')} {_plus(c * d)}"
    return _worked(
        f"Expand $({a}x {_plus(c)})({b}x {_plus(d)})$.",
        f"Multiply term by term: ${a}x \\cdot {b}x = {a * b}x^2$, ${a}x \\cdot ({d}) = {a * d}x$, $({c}) \\cdot {b}x = {b * c}x$ "
        f"and $({c}) \\cdot ({d}) = {c * d}$. Collecting terms gives ${answer}$.",
        answer,
    )


def _triangle(r: Random) -> str:
    m = r.randint(2, 9)
    n, k = r.randint(1, m - 1), r.randint(1, 5)
    a, b, c = k * (m * m - n * n), 2 * k * m * n, k * (m * m + n * n)
    return _worked(
        f"A right triangle has legs of length ${a}$ and ${b}$. Find its hypotenuse and its area.",
        f"By the theorem of Pythagoras $c = \\sqrt{{{a}^2 + {b}^2}} = \\sqrt{{{a * a + b * b}}} = {c}$. "
        f"The area is $\\frac{{1}}{{2}} \\cdot {a} \\cdot {b} = {a * b // 2}$.",
        f"c = {c}, A = {a * b // 2}",
    )


def _probability(r: Random) -> str:
    red, blue = r.randint(2, 12), r.randint(2, 12)
    total = red + blue
    p = Fraction(red * (red - 1), total * (total - 1))
    return _worked(
        f"An urn holds {red} red and {blue} blue balls. Two balls are drawn without replacement. What is the probability that both are red?",
        f"The first ball is red with probability $\\frac{{{red}}}{{{total}}}$, the second then with probability $\\frac{{{red - 1}}}{{{total - 1}}}$. "
        f"The product is ${_number(p)}$.",
        _number(p),
    )


TEMPLATES: list[Callable[[Random], str]] = [
    _linear,
    _quadratic,
    _story,
    _fractions,
    _derivative,
    _integral,
    _product,
    _system,
    _arithmetic_series,
    _geometric_series,
    _percent,
    _euclid,
    _speed,
    _choose,
    _expand,
    _triangle,
    _probability,
]


def problem(rng: Random) -> str:
    """One problem with its solution and answer."""
    return rng.choice(TEMPLATES)(rng)
