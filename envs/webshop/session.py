"""Where a shopper is in the shop, and where each action leads: the original's state machine, without the goal's reward.

| page | actions that lead on |
|---|---|
| search | `search[...]` |
| results | a product; `< prev` (from page 2), `next >` (always); `back to search` |
| item | an option; `description`, `features`, `reviews`, where shown `attributes`; `< prev` to the results; `buy now` |
| description, features, reviews, attributes | `< prev` to the item |
| done | none |

`search[...]` works on every page but the last. Searching, and going from an item to the results, forgets the chosen
options; `back to search` also which products were looked at. There are no keywords with a meaning of their own.
"""

from collections.abc import Sequence
from typing import Protocol

from envs.webshop import pages
from envs.webshop.actions import CLICK, SEARCH, Action
from envs.webshop.product import Product

PRODUCTS_PER_PAGE = 10

_SUB_PAGES = {name.lower(): name for name in pages.SUB_PAGES}


class Shop(Protocol):
    """What a session needs of a catalogue."""

    def product(self, index: int) -> Product:
        """The product of an index."""

    def search(self, text: str) -> Sequence[int]:
        """Indices of the products that a query finds, best first."""

    def index(self, asin: str) -> int:
        """The index of an asin, in whatever case."""


class Session:
    """One visit to the shop.

    Args:
      shop: the catalogue.
      instruction: the goal's text, shown on every page.
      show_attributes: whether items have a page with the attributes that the reward compares.
      per_page: products on a page of results.

    Attributes:
      place: "search", "results", "item", "description", "features", "reviews", "attributes" or "done".
      page: the parts of the page now; `clickables` what can be clicked on it.
      keywords: of the last search, None before one.
      results: what it found, indices, best first.
      results_page: the page of them that is or was shown, from 1.
      product: the index of the product that is shown or bought, None elsewhere.
      options: name -> value as chosen, in the order in which the options were first chosen.
      visited: asins of the products that were looked at.
    """

    def __init__(
        self, shop: Shop, instruction: str, *, show_attributes: bool = False, per_page: int = PRODUCTS_PER_PAGE
    ):
        self._shop, self._instruction = shop, instruction
        self._show_attributes, self._per_page = show_attributes, per_page
        self._enter()

    @property
    def bought(self) -> bool:
        """Whether the visit has ended with a purchase."""
        return self.place == "done"

    def apply(self, action: Action | None) -> bool:
        """Does an action; what is impossible on this page, and None, changes nothing.

        Returns:
          Whether the action was possible.
        """
        if action is None or self.bought:
            return False
        if action.name == SEARCH:
            self._search(action.argument)
        elif action.name == CLICK and action.argument in self.clickables and action.argument != SEARCH:
            self._click(action.argument)
        else:
            return False
        return True

    def as_text(self) -> str:
        """The page as the observation `text`."""
        return pages.as_text(self.page)

    def as_rich_text(self) -> str:
        """The page as the observation `text_rich`."""
        address = ""
        if self.place == "item":
            address = pages.item_address(self.keywords, self.results_page, self.options)
        return pages.as_rich_text(self.page, address=address, visited=self.visited)

    def show_purchase(self, reward: float) -> None:
        """Puts the score on the last page, which is blank before."""
        self._show("done", pages.done_page(self.shown_product().asin, self.options, reward))

    def shown_results(self) -> Sequence[int]:
        """Indices of the products on the page of results."""
        first = (self.results_page - 1) * self._per_page
        return self.results[first : first + self._per_page]

    def shown_products(self) -> list[Product]:
        """The products on the page of results."""
        return [self._shop.product(int(index)) for index in self.shown_results()]

    def shown_product(self) -> Product:
        """The product whose pages are shown, or that was bought."""
        return self._shop.product(self.product)

    def _show(self, place: str, page: tuple[pages.Part, ...]) -> None:
        self.place, self.page, self.clickables = place, page, pages.clickables(page)

    def _enter(self) -> None:
        self.keywords, self.results, self.results_page = None, (), 1
        self.product, self.options, self.visited = None, {}, set()
        self._show("search", pages.search_page(self._instruction))

    def _search(self, keywords: str) -> None:
        self.keywords, self.results = keywords, self._shop.search(keywords)
        self._show_results(1)

    def _show_results(self, number: int) -> None:
        self.results_page, self.product, self.options = number, None, {}
        shown = pages.results_page(self._instruction, self.shown_products(), page=number, total=len(self.results))
        self._show("results", shown)

    def _show_item(self) -> None:
        product = self.shown_product()
        self._show("item", pages.item_page(self._instruction, product, show_attributes=self._show_attributes))

    def _click(self, name: str) -> None:
        # The names of buttons win over options of the same name.
        if name == pages.BUY.lower():
            self._show("done", ())
        elif name == pages.BACK.lower():
            self._enter()
        elif self.place == "results":
            if name in (pages.NEXT.lower(), pages.PREVIOUS.lower()):
                self._show_results(self.results_page + (1 if name == pages.NEXT.lower() else -1))
            else:
                self.product = self._shop.index(name)
                self.visited.add(self.shown_product().asin)
                self._show_item()
        elif name == pages.PREVIOUS.lower():
            if self.place == "item":
                self._show_results(self.results_page)
            else:
                self._show_item()
        elif name in _SUB_PAGES:
            self._show(name, pages.sub_page(self._instruction, self.shown_product(), _SUB_PAGES[name]))
        else:
            # A value under several names is the last one's.
            options = self.shown_product().options
            self.options[[option for option, values in options.items() if name in values][-1]] = name
            self._show_item()
