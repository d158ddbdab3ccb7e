"""Answers on the page: Markdown, code, formulas, hostile text, thoughts and tool calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from page_driver import ANSWER, CHATS, answer_with, choose, last_answer, say, stream_of, wait_for_answers

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

RICH = f"{ANSWER} .rich"
CODE = "def greet(name: str) -> str:\n    return f'Hello, {name}'\n"
TEXT = f"""# A greeting

Some **bold**, *slanted* and `plain` words, a [link](https://example.org/a?b=1&c=2) and $e^{{i\\pi}} = -1$.

```python
{CODE}```

| model | tok/s |
|:------|------:|
| small |  1,200 |
| large |    85 |

$$
\\sum_{{k=1}}^n k
+ \\frac{{n(n+1)}}{{2}}
$$

1. one
2. two
   - nested

> quoted

It costs $5 and $6.
"""

HOSTILE = """<script>window.hit = 1</script><img src="https://evil.example/a.png" onerror="window.hit = 1">

![alt](https://evil.example/pixel.png) ![x](//evil.example/b.png)

[run](javascript:window.hit=1) [data](data:text/html,<script>window.hit=1</script>) <javascript:window.hit=1>

[good](https://good.example "title\\" onmouseover=\\"window.hit=1")

<iframe src="https://evil.example"></iframe><style>body { display: none }</style><svg onload="window.hit=1">

```html" onclick="window.hit=1
<script>window.hit = 1</script>
```

$\\href{javascript:window.hit=1}{x}$ $\\includegraphics{https://evil.example/c.png}$ $\\htmlData{a=b}{c}$

$\\def\\a{\\a\\a}\\a$

| <b onclick="window.hit=1">x</b> | y |
|---|---|
| &lt;script&gt; | <script>window.hit=1</script> |

<form action="https://evil.example"><input autofocus onfocus="window.hit=1"></form>
"""

DOCUMENTS = [
    TEXT,
    "- a\n*foo*\n\n- b\n\npara\n---\nmore\n===\n\n| a | b |\n|---|---|\n| 1 | 2 |\nafter\n",
    "text\n```js\nlet a = 1;\n\n\nlet b;\n```\n~~~\nx\n~~~\nend",
    "1. a\n\n   ```\n   in a list\n   ```\n2. b\n\n\\[ a \\]\n\nend",
    "> a\nlazy\n\n> b\n> - c\n\n    indented\n\n* * *\nx\r\ny\r\n\r\nz",
    "$$ a\n\nnot closed\n\n- x",
    "| a | b |\n|---|---|\n" + "| $x$ | *y* |\n" * 70 + "\nend",
    "*a* " + "many words `of` a paragraph " * 200 + "\nand a line\n\nend",
]


def test_markdown_code_tables_and_formulas(open_page: Callable[..., Page]) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    answer_with(page, TEXT)
    say(page, "Show me")
    wait_for_answers(page)
    page.wait_for_selector(f"{RICH} .code .hljs-keyword")
    page.wait_for_selector(f"{RICH} .formula.display .katex-html")
    assert page.inner_text(f"{RICH} h1") == "A greeting"
    assert page.locator(f"{RICH} .formula").count() == 2
    assert page.inner_text(f"{RICH} .code code") == CODE
    assert page.inner_text(f"{RICH} .code-head span") == "python"
    assert page.locator(f"{RICH} td.right").all_inner_texts() == ["1,200", "85"]
    assert page.locator(f"{RICH} ol > li > ul > li").inner_text() == "nested"
    assert "It costs $5 and $6." in last_answer(page)
    link = page.locator(f"{RICH} a")
    assert link.get_attribute("href") == "https://example.org/a?b=1&c=2"
    assert (link.get_attribute("rel"), link.get_attribute("target")) == ("noopener noreferrer", "_blank")
    page.click(f"{RICH} .copy")
    assert page.evaluate("navigator.clipboard.readText()") == CODE
    page.wait_for_selector(f"{RICH} .copy:text('Copied')")
    page.click(f"{ANSWER} .foot .copy")
    assert page.evaluate("navigator.clipboard.readText()") == TEXT
    assert page.evaluate("getComputedStyle(document.querySelector('.katex-mathml')).position") == "absolute"


@pytest.mark.parametrize("between", ["\n", "\n\n"], ids=["tight", "loose"])
def test_task_lists_have_boxes(open_page: Callable[..., Page], between: str) -> None:
    page = open_page()
    lines = ["- [ ] *stir*", "- [x] bake", "- [X] `eat`", "- [y] other", "- [](https://x.example) [ ]", "- [ ]"]
    answer_with(page, between.join(lines) + "\n\n1. [x] first\n   - [ ] nested\n\n[ ] not a list")
    say(page, "Plan")
    wait_for_answers(page)
    page.wait_for_selector(f"{RICH} p:text('not a list')")
    own = "items => items.map((item) => item.innerText.split('\\n')[0].trim())"
    items = page.locator(f"{RICH} li").evaluate_all(own)
    assert items == ["☐ stir", "☑ bake", "☑ eat", "[y] other", "[ ]", "[ ]", "☑ first", "☐ nested"]
    assert page.locator(f"{RICH} li.task").count() == 5
    bullets = page.locator(f"{RICH} ul > li").evaluate_all(
        "items => items.map((item) => getComputedStyle(item).listStyleType)"
    )
    assert bullets == ["none", "none", "none", "disc", "disc", "disc", "none"]
    assert page.locator(f"{RICH} p:text('not a list')").inner_text() == "[ ] not a list"


def test_hostile_text_does_nothing(open_page: Callable[..., Page]) -> None:
    page = open_page()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    answer_with(page, HOSTILE)
    say(page, "Attack")
    wait_for_answers(page)
    page.wait_for_selector(f"{RICH} .formula")
    assert page.evaluate("window.hit") is None
    allowed = [
        "a",
        "blockquote",
        "br",
        "code",
        "div",
        "em",
        "h1",
        "li",
        "ol",
        "p",
        "pre",
        "span",
        "strong",
        "table",
        "tbody",
        "td",
        "th",
        "thead",
        "tr",
        "ul",
        "button",
    ]
    outside = f"{RICH} :not({', '.join(allowed)}, .formula *)"
    assert page.locator(outside).count() == 0
    attributes = page.evaluate(
        """selector => [...document.querySelectorAll(selector)].flatMap((element) => element.getAttributeNames())""",
        f"{RICH} *",
    )
    assert not [name for name in attributes if name.startswith("on") or name in ("src", "srcset", "action")]
    links = page.locator(f"{RICH} a").evaluate_all("links => links.map(({ protocol, rel }) => protocol + rel)")
    assert set(links) == {"https:noopener noreferrer"}
    assert not [url for url in requests if "example" in url]
    assert "<script>window.hit = 1</script>" in last_answer(page)


def test_libraries_are_loaded_when_an_answer_needs_them(open_page: Callable[..., Page]) -> None:
    page = open_page()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    answer_with(page, "Just *text*.", "```sql\nSELECT 1\n```", "$x^2$")
    for number, library in enumerate(["", "highlight.min.js", "katex.min.js"], 1):
        say(page, "Go on")
        wait_for_answers(page, number)
        if library:
            page.wait_for_selector(f"{RICH} :is(.hljs-keyword, .katex) >> nth={number - 2}")
        assert [url for url in requests if "vendor" in url and url.endswith(library)] or not library
        assert len({url for url in requests if url.endswith(("highlight.min.js", "katex.min.js"))}) == number - 1


@pytest.mark.parametrize("document", DOCUMENTS, ids=range(len(DOCUMENTS)))
def test_a_growing_text_becomes_what_it_is_as_a_whole(open_page: Callable[..., Page], document: str) -> None:
    page = open_page()
    grown, whole = page.evaluate(
        """async (document_) => {
            const { RichText } = await import("/page/rich.js");
            const { formulasRendered } = await import("/page/formulas.js");
            async function shown(parts) {
                const root = document.createElement("div");
                let rendered = () => {};
                const text = new RichText(root, { rendered: () => rendered(), block() {} });
                for (const part of parts) {
                    text.append(part);
                    while (text.isBusy) await new Promise((resolve) => { rendered = resolve; });
                }
                text.end();
                while (text.isBusy) await new Promise((resolve) => { rendered = resolve; });
                await formulasRendered();
                return root.innerHTML.replace(/ class="hljs.*?"/g, "");
            }
            const size = Math.ceil(document_.length / 60);
            const parts = document_.match(new RegExp(`[^]{1,${Math.max(7, size)}}`, "g"));
            await shown(["$x$\\n```js\\nlet a\\n```"]);
            await new Promise((resolve) => { requestIdleCallback(resolve); });
            return [await shown(parts), await shown([document_])];
        }""",
        document,
    )
    assert grown == whole


def test_a_long_list_is_several_lists_that_look_like_one(open_page: Callable[..., Page]) -> None:
    page = open_page()
    answer_with(page, "".join(f"{number}. item {number}\n" for number in range(5, 105)))
    say(page, "Count")
    wait_for_answers(page)
    assert page.locator(f"{RICH} li").count() == 100
    starts = page.locator(f"{RICH} ol").evaluate_all("lists => lists.map(({ start }) => start)")
    assert starts == [5, 35, 65, 95]


def test_long_paragraphs_lists_and_tables_are_several_blocks(open_page: Callable[..., Page]) -> None:
    page = open_page()
    words = " ".join(f"*word* {number}" for number in range(2000))
    lines = "\n".join(f"line {number} of `code` and $x$" for number in range(500))
    items = "".join(f"- {'item ' * 100}\n" for _ in range(20))
    rows = "".join(f"| {number} | b |\n" for number in range(100))
    answer_with(page, f"{words}\n\n{lines}\n\n{items}\n| a | b |\n|---|--:|\n{rows}\nThe end.")
    say(page, "Much")
    wait_for_answers(page)
    page.wait_for_selector(f"{RICH} p:text('The end.')")
    sizes = page.locator(f"{RICH} > .block").evaluate_all("blocks => blocks.map(({ innerText }) => innerText.length)")
    assert len(sizes) > 25
    assert max(sizes) < 4000
    assert page.locator(f"{RICH} p em").count() == 2000
    assert page.locator(f"{RICH} p code").count() == 500
    tables = page.locator(f"{RICH} table").evaluate_all(
        "tables => tables.map(({ rows }) => [rows.length, rows[0].cells[0].offsetWidth, rows[0].cells[1].className])"
    )
    assert [rows for rows, _, _ in tables] == [31, 30, 30, 10]
    assert len({width for _, width, _ in tables}) == 1
    assert {alignment for _, _, alignment in tables} == {"right"}
    text = " ".join(last_answer(page).split())
    assert all(f"word {number}" in text for number in range(2000))


def test_formulas_are_rendered_a_few_at_a_time(open_page: Callable[..., Page]) -> None:
    page = open_page()
    numbers = page.evaluate(
        """async () => {
            const tasks = [];
            const idle = globalThis.requestIdleCallback;
            globalThis.requestIdleCallback = (task, options) => idle(() => { tasks.push(0); task(); }, options);
            const { formulasRendered, renderFormulas } = await import("/page/formulas.js");
            function filled(count, name) {
                const root = document.createElement("div");
                for (let index = 0; index < count; index += 1) {
                    const formula = document.createElement("span");
                    formula.className = "math";
                    formula.textContent = `${name}_{${index}}`;
                    root.append(formula);
                }
                return root;
            }
            renderFormulas(filled(1, "w"));
            await formulasRendered();
            tasks.length = 0;
            const { render } = katex;
            katex.render = (...given) => { tasks.push(tasks.pop() + 1); render(...given); };
            const [shown, gone, again] = [filled(100, "x"), filled(50, "y"), filled(100, "x")];
            renderFormulas(shown);
            renderFormulas(gone, () => false);
            await formulasRendered();
            renderFormulas(again);
            const count = (root) => root.querySelectorAll(".formula").length;
            return { tasks, shown: count(shown), gone: count(gone), again: count(again) };
        }"""
    )
    assert sum(numbers["tasks"]) == 100  # and none outside of a task, nor again
    assert max(numbers["tasks"]) <= 12
    assert (numbers["shown"], numbers["gone"], numbers["again"]) == (100, 0, 100)


def test_a_long_text_is_rendered_in_many_tasks(open_page: Callable[..., Page]) -> None:
    page = open_page()
    added = page.evaluate(
        """async () => {
            const { RichText } = await import("/page/rich.js");
            const root = document.createElement("div");
            const lengths = [];
            let rendered = () => {};
            const note = () => { lengths.push(root.textContent.length); rendered(); };
            const text = new RichText(root, { rendered: note, block() {} });
            text.append(Array.from({ length: 5000 }, (_, index) => `- word ${index}\\n`).join(""));
            text.end();
            while (text.isBusy) await new Promise((resolve) => { rendered = resolve; });
            const growth = lengths.map((length, index) => length - (lengths[index - 1] ?? 0));
            return { most: Math.max(...growth), items: root.querySelectorAll("li").length };
        }"""
    )
    assert added["items"] == 5000
    assert added["most"] <= 9000  # characters


def test_nothing_is_rendered_while_it_is_not_shown(open_page: Callable[..., Page]) -> None:
    page = open_page()
    before, after = page.evaluate(
        """async () => {
            const { RichText } = await import("/page/rich.js");
            const root = document.createElement("div");
            let rendered = () => {};
            const text = new RichText(root, { rendered: () => rendered(), block() {} });
            text.setShown(false);
            text.append("One *two*");
            text.end();
            await new Promise((resolve) => { requestIdleCallback(resolve); });
            const before = root.textContent;
            text.setShown(true);
            while (text.isBusy) await new Promise((resolve) => { rendered = resolve; });
            return [before, root.innerHTML.trim()];
        }"""
    )
    assert (before, after.replace("\n", "")) == ("", '<div class="block"><p>One <em>two</em></p></div>')


def test_complete_blocks_are_rendered_once(open_page: Callable[..., Page]) -> None:
    page = open_page()
    kept, blocks = page.evaluate(
        """async () => {
            const { RichText } = await import("/page/rich.js");
            const root = document.createElement("div");
            let rendered = () => {};
            const text = new RichText(root, { rendered: () => rendered(), block() {} });
            const firsts = [];
            for (let part = 0; part < 40; part += 1) {
                text.append(`Paragraph ${part} with **some** words.\\n\\n`.repeat(50));
                while (text.isBusy) await new Promise((resolve) => { rendered = resolve; });
                firsts.push(root.children[1]);
            }
            text.end();
            while (text.isBusy) await new Promise((resolve) => { rendered = resolve; });
            return [firsts.every((first) => first === root.children[1]), root.children.length];
        }"""
    )
    assert kept
    assert blocks == 2000


def test_thoughts_are_folded(open_page: Callable[..., Page]) -> None:
    page = open_page()
    answer_with(page, [{"reasoning_content": "Let me "}, {"reasoning_content": "think."}, {"content": "Four."}])
    say(page, "2 + 2?")
    wait_for_answers(page)
    assert page.is_hidden(f"{ANSWER} .reasoning")
    assert page.inner_text(f"{ANSWER} .thoughts summary").startswith("Thought")
    page.click(f"{ANSWER} .thoughts summary")
    assert page.inner_text(f"{ANSWER} .reasoning") == "Let me think."
    assert last_answer(page) == "Four."


def test_tool_calls_are_shown_and_get_results(open_page: Callable[..., Page]) -> None:
    page = open_page()
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    choose(page, tools='[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]')
    call: list[dict[str, Any]] = [
        {
            "tool_calls": [
                {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Oslo"}'}}]},
    ]
    bodies = answer_with(page, call, "It rains.")
    say(page, "Weather in Oslo?")
    wait_for_answers(page)
    assert page.inner_text(f"{ANSWER} .call summary") == "Calls weather"
    assert page.inner_text(f"{ANSWER} .call pre") == '{\n  "city": "Oslo"\n}'
    page.fill(".results textarea", "rain")
    page.click("text=Send results")
    wait_for_answers(page, 2)
    assert last_answer(page) == "It rains."
    assert bodies[0]["tools"] == tools
    made = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    assert bodies[1]["messages"][1:] == [
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
    ]


def test_log_probabilities_are_asked_for_only_where_wanted(open_page: Callable[..., Page]) -> None:
    page = open_page()
    bodies = answer_with(page, "Yes.")
    say(page, "One")
    wait_for_answers(page)
    choose(page, tint=True)
    say(page, "Two")
    wait_for_answers(page, 2)
    assert "logprobs" not in bodies[0]
    assert (bodies[1]["logprobs"], bodies[1]["top_logprobs"]) == (True, 5)


def test_an_answer_that_breaks_off_is_kept(open_page: Callable[..., Page]) -> None:
    page = open_page()

    def cut(route: Route) -> None:
        body = stream_of([{"content": "Half an"}]).split("\n\n")[0] + "\n\n"
        route.fulfill(content_type="text/event-stream", body=body)

    page.route(CHATS, cut)
    say(page, "Go")
    wait_for_answers(page)
    assert "incomplete" in page.inner_text(".error")
    assert last_answer(page) == "Half an"
