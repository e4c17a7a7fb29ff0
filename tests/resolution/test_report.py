"""The page of a search for the best resolution."""

from rltrain.tools.resolution.report import write_page


def setting(name, tokens, value=0.5, default=False, stopped=False, seconds=0.1):
    return {
        "name": name, "image_tokens": tokens, "value": value, "low": 0.4, "high": 0.6, "default": default,
        "stopped": stopped, "seconds_per_prompt": seconds,
    }  # fmt: skip


def test_the_page_marks_the_chosen_setting_and_those_that_were_stopped(tmp_path):
    settings = [
        setting("none", 9.0, default=True), setting("small", 1.0), setting("large", 36.0, stopped=True),
        setting("unscored", 4.0, value=None, seconds=None),
    ]  # fmt: skip
    difference = {"value": 0.1, "low": 0.02, "high": 0.2}
    write_page(
        tmp_path / "resolution.html", {"settings": settings, "chosen": {"name": "small"}, "difference": difference}
    )
    page = (tmp_path / "resolution.html").read_text(encoding="utf-8")
    assert page.count("data-root-id") == 2
    assert page.count('"axis_label":"image tokens per prompt"') == 2
    assert "0.100 [0.020, 0.200]: better." in page
    for mark in ("default", "chosen", "stopped"):
        assert f'"{mark}"' in page
