"""What the shop knows of one product, in the form that pages, goals and rewards read."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class HumanInstruction:
    """A goal that a person wrote for a product.

    Attributes:
      instruction: the text, without a price.
      attributes: what the product must be; empty where the writer named nothing (such records make no goal).
      options: values to choose, without the names of their options.
    """

    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """One product of a catalogue.

    Attributes:
      asin: its id, as the source writes it (ten characters at most).
      title: one line.
      description: prose, may be empty.
      bullets: its features, at least one, which may be empty text. The first is searched, all are shown.
      price_label: as pages show it: "$11.07", "$3.78 to $11.38".
      prices: dollars; one price, or the two ends of a range as the source orders them.
      options: name -> values, both lower case, in the order of the pages.
      attributes: what the reward compares a goal's attributes with.
      query: what the source searched for when it found this product; lower case.
      category: the broad one ("beauty").
      product_category: the path "A › B › C".
      instruction: a goal that was written by machine, without options and price; None where there is none.
      instruction_attributes: what that goal asks for.
      human_instructions: goals that people wrote.
      title_nouns: the nouns of the title, lower case, in order, with repeats; what decides whether two products are
        of one kind.
    """

    asin: str
    title: str
    description: str = ""
    bullets: tuple[str, ...] = ("",)
    price_label: str = "$100.0"
    prices: tuple[float, ...] = (100.0,)
    options: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    attributes: tuple[str, ...] = ()
    query: str = ""
    category: str = ""
    product_category: str = ""
    instruction: str | None = None
    instruction_attributes: tuple[str, ...] = ()
    human_instructions: tuple[HumanInstruction, ...] = ()
    title_nouns: tuple[str, ...] = ()


def searched_text(product: Product) -> str:
    """The text by which search finds a product: title, description, first bullet and options, in lower case."""
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    return " ".join([product.title, product.description, product.bullets[0], options]).lower()
