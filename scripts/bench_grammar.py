"""Cost of token constraints: `.venv/bin/python scripts/bench_grammar.py --help`.

The same batch runs with and without a grammar, in turns, since the load of a shared machine changes by the second. Some
requests are free, and the others are constrained in every second run; all get the same number of tokens. The report has
the median over the turns of the ratios of inter-token latencies, and the ratio of the best ones, for the free and for
the constrained requests.

`strings` allows an array of any JSON strings. The strings of `counted` have at least 4,000 characters, each of which is
a grammar state of its own; so are those of `text`, sentences of words by a regex, whose masks take longer. `records`
has many forced tokens.
"""

from __future__ import annotations

import argparse

from bench.grammar_mix import GRAMMARS, GrammarMix

from quire.frontend import LLM


def parse_mix(text: str) -> tuple[int, int]:
    """Parse `4+2`: four free requests and two constrained ones."""
    free, constrained = text.split("+")
    return int(free), int(constrained)


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder with a tokenizer; the demo model by default")
    parser.add_argument("--grammars", nargs="+", choices=GRAMMARS, default=list(GRAMMARS))
    parser.add_argument(
        "--mixes", type=parse_mix, nargs="+", default=[(0, 1), (7, 1), (4, 4), (24, 8)], metavar="FREE+CONSTRAINED"
    )
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each request (default 200)")
    parser.add_argument("--turns", type=int, default=15, help="valid turns of each mix (default 15)")
    parser.add_argument(
        "--max-steal", type=float, default=0.005, help="largest share of steal time in a valid turn (default 0.005)"
    )
    parser.add_argument("--attempts", type=int, default=4, help="attempts at each turn (default 4)")
    arguments = parser.parse_args()
    llm = LLM(arguments.model, preload_grammars=True, max_model_len=arguments.tokens + 16)
    mixes = [
        GrammarMix(llm, grammar, free, constrained, arguments.tokens)
        for grammar in arguments.grammars
        for free, constrained in arguments.mixes
    ]
    try:
        for _ in range(arguments.turns * arguments.attempts):
            for mix in mixes:
                if mix.num_turns < arguments.turns:
                    mix.turn(arguments.max_steal)
    finally:
        for mix in mixes:
            print(mix.report())
        llm.close()


if __name__ == "__main__":
    main()
