"""The controls of bench.learning_agents tell nothing, and are otherwise what they stand for."""

from pathlib import Path

from bench import noise
from rltrain.agents.environments import methods_of
from rltrain.agents.functions import tools_of
from rltrain.agents.ready import calculator

ROW = {"extra_info": {"low": 1, "high": 15, "number": 9}}


def test_the_calculator_that_knows_nothing_is_shown_as_the_other_is():
    (told,) = tools_of(str(Path(noise.__file__))).values()
    (honest,) = tools_of(calculator.__name__).values()
    assert told.name == honest.name
    assert told.schema["function"]["parameters"].keys() == honest.schema["function"]["parameters"].keys()
    results = [noise.calculator(f"{number}+1") for number in range(40)]
    assert len(set(results)) > 20
    assert results == [noise.calculator(f"{number}+1") for number in range(40)]
    assert sum(int(result) == number + 1 for number, result in enumerate(results)) < 4


def test_the_deaf_environment_says_its_words_by_chance_and_knows_the_number():
    assert methods_of("bench/noise.py:DeafGuess", noise.DeafGuess) == {}
    words = set()
    for seed in range(20):
        game = noise.DeafGuess()
        game.reset(ROW, seed)
        words.add(game.step("3")[0])
        assert game.step("9") == ("correct", 1.0, True)
        assert game.score()["found"] == 1
    assert words == {"higher", "lower"}
