"""Nobody looks for garbage in modules: not while they are imported, and not soon after."""

import gc

from rltrain.base.imports import importing


def test_what_is_imported_is_looked_through_neither_then_nor_soon_after():
    with importing():
        assert not gc.isenabled()
        made = [[]]
    assert gc.isenabled()
    assert not any(each is made for young in (0, 1) for each in gc.get_objects(generation=young))
    assert any(each is made for each in gc.get_objects(generation=2))
