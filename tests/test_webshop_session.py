"""Pages of the shop and the state machine between them, on products that a person can overlook."""

import dataclasses

import pytest

from envs.webshop import pages
from envs.webshop.actions import parse
from envs.webshop.session import Session
from tests.webshop_cases import SHIRT, Shelf, many


def visit(*actions: str, shop=None, **kwargs) -> Session:
    """A session after actions, each of which must be possible."""
    session = Session(shop or Shelf(), "Find me shirts", **kwargs)
    for action in actions:
        assert session.apply(parse(action)), action
    return session


def test_pages_as_text():
    assert visit().as_text() == "WebShop [SEP] Instruction: [SEP] Find me shirts [SEP] Search"
    assert visit("search[shirt tee]").as_text() == (
        "Instruction: [SEP] Find me shirts [SEP] Back to Search [SEP] Page 1 (Total results: 3) [SEP] Next > [SEP] "
        "B00000SHRT [SEP] Acme Cotton Shirt [SEP] $11.07 [SEP] B00000TEE1 [SEP] Summer tee [SEP] $3.78 to $11.38 [SEP] "
        "B00000LAMP [SEP] Desk lamp shirt [SEP] $999.5"
    )
    assert visit("search[shirt]", "click[b00000shrt]").as_text() == (
        "Instruction: [SEP] Find me shirts [SEP] Back to Search [SEP] < Prev [SEP] color [SEP] light blue [SEP] "
        '2005black [SEP] navy "x" [SEP] size [SEP] small [SEP] large [SEP] Acme Cotton Shirt [SEP] Price: $11.07 [SEP] '
        "Rating: N.A. [SEP] Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
    )
    head = "Instruction: [SEP] Find me shirts [SEP] Back to Search [SEP] < Prev"
    description = visit("search[shirt]", "click[b00000shrt]", "click[description]")
    assert description.as_text() == f"{head} [SEP] A shirt.\xa0Machine wash."
    # An empty feature is a blank between the tags.
    features = visit("search[shirt]", "click[b00000shrt]", "click[features]")
    assert features.as_text() == f"{head} [SEP] Soft cotton [SEP] "
    assert features.as_rich_text().endswith("[button] < Prev [button_]\n Soft cotton \n \n")
    assert visit("search[shirt]", "click[b00000shrt]", "click[reviews]").as_text() == head
    # A product without a description has an empty page.
    assert visit("search[tee]", "click[b00000tee1]", "click[description]").as_text() == head
    attributes = visit("search[lamp]", "click[b00000lamp]", "click[attributes]", show_attributes=True)
    assert attributes.as_text() == f"{head} [SEP] energy saving [SEP] garden [SEP] lamps [SEP] Home › Lighting"


def test_rich_text_marks_what_was_clicked():
    session = visit("search[shirt]", "click[b00000shrt]", "click[large]", "click[light blue]", "click[< prev]")
    assert "\n\n[clicked button] B00000SHRT [clicked button_]\nAcme Cotton Shirt\n$11.07\n" in session.as_rich_text()
    assert "\n\n[button] B00000LAMP [button_]\n" in session.as_rich_text()
    session = visit("search[shirt]", "click[b00000shrt]", "click[small]", "click[light blue]")
    assert session.as_rich_text() == (
        "You have clicked small.\nYou have clicked light blue.\nInstruction:\nFind me shirts\n"
        "[button] Back to Search [button_]\n[button] < Prev [button_]\n"
        "color\n  [clicked button] light blue [clicked button_]\n  [button] 2005black [button_]\n"
        '  [button] navy "x" [button_]\n'
        "size\n  [clicked button] small [clicked button_]\n  [button] large [button_]\n"
        "Acme Cotton Shirt\nPrice: $11.07\nRating: N.A.\n[button] Description [button_]\n[button] Features [button_]\n"
        "[button] Reviews [button_]\n[button] Buy Now [button_]\n"
    )
    # The original looks for the JSON of the choice, in which quotes are escaped.
    session = visit("search[shirt]", "click[b00000shrt]", 'click[navy "x"]')
    assert session.options == {"color": 'navy "x"'} and "clicked" not in session.as_rich_text()
    assert "clicked button] large" in visit('search["large" shirt]', "click[b00000shrt]").as_rich_text()


def test_clickables_in_the_order_of_the_page():
    assert visit().clickables == ("search",)
    found = ("b00000shrt", "b00000lamp")
    assert visit("search[shirt]").clickables == ("back to search", "next >", *found)
    assert visit("search[shirt]", "click[next >]").clickables == ("back to search", "< prev", "next >")
    buttons = ("back to search", "< prev", "description", "features", "reviews", "buy now")
    # "small" stands under both options, "buy now" is a button already.
    assert visit("search[tee]", "click[b00000tee1]").clickables == (*buttons, "small", "slim")
    assert visit("search[tee]", "click[b00000tee1]", "click[features]").clickables == buttons[:2]
    assert visit("search[tee]", "click[b00000tee1]", "click[buy now]").clickables == ()


def test_results_in_pages_of_ten():
    session = visit("search[thing]", shop=many(23))
    assert len(session.shown_products()) == 10 and session.page[3].text == "Page 1 (Total results: 23)"
    assert "< prev" not in session.clickables
    session.apply(parse("click[next >]"))
    session.apply(parse("click[next >]"))
    assert [product.title for product in session.shown_products()] == ["thing 20", "thing 21", "thing 22"]
    # Past the end the page is empty, and there is a next one still.
    session.apply(parse("click[next >]"))
    assert session.page[3].text == "Page 4 (Total results: 23)" and session.shown_products() == []
    assert session.apply(parse("click[next >]")) and session.results_page == 5
    session = visit("search[thing]", "click[next >]", "click[b000000013]", "click[features]", shop=many(23))
    session.apply(parse("click[< prev]"))
    assert session.place == "item"
    session.apply(parse("click[< prev]"))
    assert (session.place, session.results_page) == ("results", 2)
    session.apply(parse("click[< prev]"))
    assert session.results_page == 1
    assert len(visit("search[thing]", shop=many(23), per_page=4).shown_products()) == 4
    assert (
        visit("search[nothing of the kind]", shop=many(3)).as_text().endswith("Page 1 (Total results: 0) [SEP] Next >")
    )


def test_what_is_kept_and_what_is_forgotten():
    session = visit("search[shirt]", "click[b00000shrt]", "click[large]", "click[small]", "click[light blue]")
    assert list(session.options.items()) == [("size", "small"), ("color", "light blue")]
    session.apply(parse("click[description]"))
    session.apply(parse("click[< prev]"))
    assert session.options == {"size": "small", "color": "light blue"}
    session.apply(parse("click[< prev]"))
    assert session.options == {} and session.product is None and session.visited == {"B00000SHRT"}
    session.apply(parse("click[b00000shrt]"))
    session.apply(parse("search[tee]"))  # from any page
    assert session.place == "results" and session.visited == {"B00000SHRT"}
    session.apply(parse("click[back to search]"))
    assert session.visited == set() and session.keywords is None and session.place == "search"


def test_a_value_under_two_names_is_the_last_ones_and_buttons_win():
    session = visit("search[tee]", "click[b00000tee1]", "click[small]")
    assert session.options == {"fit": "small"}
    session.apply(parse("click[buy now]"))
    assert session.bought and session.options == {"fit": "small"}


@pytest.mark.parametrize(
    ("path", "impossible"),
    [
        ((), ("click[search]", "click[b00000shrt]", "click[buy now]", "click[back to search]", "garbage", "search[]")),
        (("search[shirt]",), ("click[< prev]", "click[buy now]", "click[b00000tee1]", "click[b00000shrt ]", "")),
        (("search[shirt]", "click[b00000shrt]"), ("click[next >]", "click[attributes]", "click[xl]", "click[color]")),
        (("search[shirt]", "click[b00000shrt]", "click[buy now]"), ("search[tee]", "click[back to search]")),
    ],
)
def test_the_impossible_changes_nothing(path, impossible):
    session = visit(*path)
    before = session.page, session.place, dict(session.options), session.as_rich_text()
    for action in impossible:
        assert not session.apply(parse(action))
        assert (session.page, session.place, dict(session.options), session.as_rich_text()) == before


def test_back_doors_of_the_search_are_plain_words():
    # In the original they give 50 products at random, or all of a query or category, here a shirt and a tee.
    assert visit("search[<r>]").results == visit("search[<c> fashion]").results == []
    assert visit("search[<q> men's shirts]").results == visit("search[men's shirts]").results == [0, 2]


def test_last_page():
    session = visit("search[shirt]", "click[b00000shrt]", "click[large]", 'click[navy "x"]', "click[buy now]")
    session.show_purchase(0.75)
    text = session.as_text()
    assert text.startswith("Thank you for shopping with us! [SEP] Your code: [SEP] None [SEP] (Paste it in your MTurk")
    # Names in order, quotes escaped once by JSON.
    assert 'asin [SEP] B00000SHRT [SEP] options [SEP] {"color": "navy \\"x\\"", "size": "large"} [SEP] attrs' in text
    assert text.endswith("Your score (min 0.0, max 1.0) [SEP] 0.75 [SEP] Reward Details [SEP] None")
    shown = pages.as_text(pages.done_page("A", {"a": "<b> & 'c'"}, 1.0))
    assert '{"a": "\\u003cb\\u003e \\u0026 \\u0027c\\u0027"}' in shown


def test_blank_texts_are_what_the_parser_of_web_pages_leaves():
    # Without a line feed one blank, with one nothing; a no-break space is text.
    for bullet, shown in (("", " \n"), ("  \t ", " \n"), ("\n", ""), ("\xa0", " \xa0\n"), (" x ", "  x \n")):
        product = dataclasses.replace(SHIRT, bullets=(bullet,))
        assert pages.as_rich_text(pages.sub_page("i", product, "Features")).partition("Prev [button_]\n")[2] == shown
