"""Makes the two CSV files beside it: synthetic customers, no real person. Run again, it makes the
same files.

python examples/own-files/make_data.py
"""

from __future__ import annotations

import csv
import math
import random
from pathlib import Path

ROWS = 600
HERE = Path(__file__).parent
PRODUCTS = {"current": 0.0, "savings": -0.4, "loan": 0.7}
REGIONS = {"north": 0.3, "east": 0.0, "south": -0.3, "west": 0.0}
WARDS = {"none": -0.9, "surgery": 0.2, "cardiology": 1.2, "oncology": 0.9}
SMOKER = {"never": -0.7, "former": 0.1, "yes": 0.9}


def main() -> None:
    draw = random.Random(20240601)  # noqa: S311 - no secrets
    bank, hospital = [], []
    for number in range(ROWS):
        person = f"C{number:04d}"
        age, income = draw.randint(20, 85), round(draw.lognormvariate(10.4, 0.4))
        product, region = draw.choice(list(PRODUCTS)), draw.choice(list(REGIONS))
        ward, smoker = (
            draw.choices(list(WARDS), (6, 2, 1, 1))[0],
            draw.choices(list(SMOKER), (5, 3, 2))[0],
        )
        visits, pressure = (
            min(12, int(draw.expovariate(0.5))),
            round(draw.gauss(128 + 0.2 * (age - 50), 12)),
        )
        # Whether the person claims on the insurance: both files say something of it.
        score = (
            0.05 * (age - 50) - 0.6 * math.log(income / 33000) + PRODUCTS[product] + REGIONS[region]
        )
        score += (
            1.2 * WARDS[ward] + 1.2 * SMOKER[smoker] + 0.25 * (visits - 2) + 0.03 * (pressure - 128)
        )
        claim = "yes" if draw.random() < 1 / (1 + math.exp(-1.6 * score)) else "no"
        bank.append((person, age, income, product, region, claim))
        # The hospital has not measured everybody's blood pressure.
        hospital.append((person, ward, smoker, visits, "" if draw.random() < 0.05 else pressure))
    # The order of the rows does not matter: ids are matched.
    draw.shuffle(hospital)
    write("bank.csv", ("customer", "age", "income", "product", "region", "claim"), bank)
    write("hospital.csv", ("customer", "ward", "smoker", "visits", "blood_pressure"), hospital)


def write(name: str, header: tuple[str, ...], rows: list[tuple[object, ...]]) -> None:
    with (HERE / name).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])


if __name__ == "__main__":
    main()
