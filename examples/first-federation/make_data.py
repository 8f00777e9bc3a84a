"""Makes bank/bank.csv and shop/shop.csv in this folder, for the tutorial of the first federation
(docs/tutorials/first-federation.md): synthetic people, no real one.

python examples/first-federation/make_data.py

The tables are as raw as those of two organisations: other people, other names of columns, ids spelt
in other ways, in another order, with missing values, and columns of no use. Run again, it makes the
same files.
"""

from __future__ import annotations

import csv
import math
import random
from pathlib import Path

# True: the shop's file has semicolons, decimal commas and the encoding cp1252.
SHOP_AS_EXCEL = True
AT_BOTH, AT_BANK, AT_SHOP = 1_600, 400, 500
PRODUCTS = {"current": 0.0, "savings": -0.5, "loan": 0.7}
TOWNS = ("Köln", "Zürich", "Malmö", "Orléans", "Graz", "Bern")
PAYS = {"card": -0.6, "invoice": 0.9, "transfer": 0.0}
FIRST = (
    "Ada",
    "Ben",
    "Cleo",
    "Dan",
    "Eva",
    "Finn",
    "Gül",
    "Hugo",
    "Ida",
    "Jan",
    "Kim",
    "Lea",
    "Max",
    "Noa",
    "Olé",
    "Pia",
)
LAST = (
    "Adler",
    "Berg",
    "Conti",
    "Dahl",
    "Engel",
    "Falk",
    "Gomez",
    "Hahn",
    "Ito",
    "Jung",
    "Kraus",
    "Lind",
    "Marek",
)


def main() -> None:
    draw = random.Random(20250301)  # noqa: S311 - no secrets
    bank, shop = [], []
    for number in range(AT_BOTH + AT_BANK + AT_SHOP):
        customer = f"K-{number * 7919 % 100_000:05d}"
        age, income = draw.randint(19, 80), round(draw.lognormvariate(10.3, 0.4))
        product, pays = draw.choice(list(PRODUCTS)), draw.choices(list(PAYS), (5, 2, 3))[0]
        orders, returns = 1 + min(40, int(draw.expovariate(0.15))), draw.betavariate(2, 6)
        basket = draw.lognormvariate(3.6, 0.5)
        # Whether the person fails to pay a loan back: both tables say something of it.
        score = -0.9 - 0.03 * (age - 50) - 1.0 * math.log(income / 30_000) + PRODUCTS[product]
        score += (
            1.3 * PAYS[pays]
            + 5.0 * (returns - 0.25)
            - 0.06 * (orders - 7)
            + 0.5 * math.log(basket / 37)
        )
        default = "yes" if draw.random() < 1 / (1 + math.exp(-1.5 * score)) else "no"
        name = f"{draw.choice(FIRST)} {draw.choice(LAST)} {number}"
        known = "" if draw.random() < 0.04 else income
        if number < AT_BOTH + AT_BANK:
            bank.append((customer, name, age, known, product, default))
        if number < AT_BOTH or number >= AT_BOTH + AT_BANK:
            client = draw.choice((customer.lower(), f" {customer}", f"{customer}  "))
            shop.append(
                (
                    client,
                    draw.choice(TOWNS),
                    pays,
                    orders,
                    _decimal(returns, 3),
                    _decimal(basket, 2),
                )
            )
    draw.shuffle(bank)
    draw.shuffle(shop)
    _write("bank", ("customer", "name", "age", "income", "product", "default"), bank, ",", "utf-8")
    dialect = (";", "cp1252") if SHOP_AS_EXCEL else (",", "utf-8")
    _write("shop", ("client_no", "town", "pays_by", "orders", "returned", "basket"), shop, *dialect)


def _decimal(value: float, places: int) -> str:
    text = f"{value:.{places}f}"
    return text.replace(".", ",") if SHOP_AS_EXCEL else text


def _write(
    name: str,
    header: tuple[str, ...],
    rows: list[tuple[object, ...]],
    separator: str,
    encoding: str,
) -> None:
    Path(name).mkdir(exist_ok=True)
    with Path(name, f"{name}.csv").open("w", newline="", encoding=encoding) as file:
        csv.writer(file, delimiter=separator, lineterminator="\n").writerows([header, *rows])


if __name__ == "__main__":
    main()
