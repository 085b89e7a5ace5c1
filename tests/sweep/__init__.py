"""Processes struck at each step of a call's and a worker's life: `make sweep`.

    places         every place in the source, and which sweep strikes there in which state
    kill_points    the sweeps themselves, given to pytest by name: they take minutes, so `make test` leaves them out
    thread_points  the sweep over workers that are threads, which thread_program makes and judges: cheap, since nothing has to die
    judge          stands outside: plans the strikes, hears of the hits, compares ledger, outcomes and processes
    program, calls what is under test, and what its workers run
    table          what the sweep prints in the end

A strike happens at the n-th passing of a place in a state; n is raised until a run is not hit any more.
"""
