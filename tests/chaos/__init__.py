"""Workers killed at random under a mixed load, judged from outside: python -m tests.chaos, or `make chaos`.

__main__, judge   the parent: starts programs under test, kills their processes, looks what is left
nemesis           which fault comes when: a function of the seed
program, load     the program under test: runners under load, round by round, and what became of every call
calls             what runs in the workers; every call enters itself in a ledger before it does anything else, and its end at last
history           compares ledger, outcomes and kills when everybody is dead
order             the order of the events of each call: submitted, begun, ended, told
"""
