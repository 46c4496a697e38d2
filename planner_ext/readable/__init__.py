"""What a person reads before a decision: a call's arguments as text, code and tables, with nothing hidden.

    text          what is drawn as nothing is marked; standard emoji and joiners are shown
    parts         a call's arguments as a list of parts, and what an edit changes in them
    html, plain   the parts drawn for a page and for a notice; the command line has its own

Without Pygments code has no colours; without ``emoji`` the joiners in emoji are marked,
too.
"""
