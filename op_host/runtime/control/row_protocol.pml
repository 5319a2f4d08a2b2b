/* The row protocol of control.h and layout.h, for a model checker (spin): every interleaving of N ranks that run OPS
 * operators each, fail some of them before they begin, and may be killed or aborted at any moment. Memory is sequentially
 * consistent here; that the orders given in the code suffice for it is not shown.
 *
 * What is checked, by the names under which the code refers to it:
 *   ROW      a row is not overwritten while a peer reads it
 *   VERDICT  all ranks that agree come to the same verdict about an operator, if no row changes
 *   REFUSED  nobody writes into memory of an operator that its owner has refused, even if a row changes
 *   DONE     a rank that returns an output has all of it, and nobody writes into it afterwards
 *   LATE     after an error nobody writes into memory that the caller has, or that has been given out again
 *   ENDS     no wait lasts for ever (an invalid end state)
 *
 * With -DFAULT=n one of the rules is broken; the checker must find that:
 *   1  open() does not wait until the last rows have been seen         ROW
 *   2  a receiver does not wait for those who write into its output    DONE
 *   3  nobody watches the peers' processes                             ENDS
 *   4  outputs are not cut out before an error is raised               LATE
 *   5  a block is given out again before its writers have promised     LATE
 *   6  only the failed row of rank 0 is looked at                      VERDICT or ENDS
 *   7  a rank that refuses an operator does not wait for the others    REFUSED
 *
 * With -DCHANGES the last rank is broken: its rows change at any moment, so that ranks may disagree on the outcome.
 */
#ifndef N
#define N 2
#endif
#ifndef OPS
#define OPS 3
#endif
#ifndef FAULT
#define FAULT 0
#endif
#if FAULT == 7
#define CHANGES
#endif

typedef Rank {
    byte seq[2];   /* of its two rows, published once the rest is written */
    byte data[2];  /* what the row says: the operator that it belongs to */
    bit failed[2];
    bit changed[2];/* says that it has failed, which it has not */
    byte done;     /* Flags::done */
    byte copied[N];/* the operator of which a peer's data lie in this rank's output */
    byte returned; /* the last operator whose output the caller has */
    byte refused;  /* Flags::refused */
    byte freed;    /* the last operator whose arrays the caller has again, because it was refused */
    bit left;      /* makes no more calls */
    bit raised;    /* the caller has an error, and the array of the operator in which it came */
    bit cut;       /* whose pages are private now */
    bit reused;    /* and whose shared pages have been given out again */
    bit busy;      /* in an operator */
    bit acked;     /* RankStatus::acked: writes to no peer again */
    bit alive;
};

Rank r[N];
bit poison;
byte refused; /* ControlHeader::refused: the last operator that anybody has refused */
byte verdict[OPS + 1]; /* 0: none yet, 1: goes on, 2: failed */

#if N == 2
#define EVERY(what) (what(0) && what(1))
#define SOME(what) (what(0) || what(1))
#else
#define EVERY(what) (what(0) && what(1) && what(2))
#define SOME(what) (what(0) || what(1) || what(2))
#endif
#define HAS_ROW(j) (r[j].seq[s & 1] >= s)
#define HAS_DONE(j) (j == me || r[j].done >= s)
#define LEFT_BEFORE_DONE(j) (!HAS_DONE(j) && r[j].left)
#define REFUSES(j) (r[j].refused == s)
#define HAS_REFUSED(j) (r[j].refused >= s)
#define HAS_GONE_ON(j) (r[j].seq[(s + 1) & 1] > s || r[j].left)
#define KNOWS(j) (HAS_REFUSED(j) || HAS_GONE_ON(j))
#define PROMISED(j) (j == me || r[j].acked || !r[j].alive)

/* ControlPlane::wait: what was published before a poisoning counts. */
#define WAIT(ready) \
    (ready || poison); \
    if \
    :: ready \
    :: else -> goto raise \
    fi

/* ControlPlane::note_refusal */
#define NOTE_REFUSAL \
    r[me].refused = s; \
    if \
    :: refused < s -> refused = s \
    :: else \
    fi

/* ControlPlane::confirm: another rank has refused what this one has agreed to. */
#define DISAGREES (refused >= s && SOME(REFUSES))
#define CONFIRM \
    if \
    :: DISAGREES -> poison = 1; goto raise \
    :: else \
    fi

proctype Process(byte me) {
    byte s = 0;
    byte j;
    bit settled = 1;
    bit any;
    bit fails; /* a rank does not read its own row back */
    {
        do
        :: s < OPS ->
            /* open */
            r[me].busy = 1;
            if :: poison -> goto raise :: else fi;
#if FAULT != 1
            if
            :: !settled -> WAIT(EVERY(HAS_ROW))
            :: else
            fi;
#endif
            atomic { /* fail, or fill the row */
                s++;
                settled = 0;
                r[me].data[s & 1] = s;
                if
                :: fails = 1
                :: fails = 0
                fi;
                r[me].failed[s & 1] = fails;
                if
                :: fails -> NOTE_REFUSAL
                :: else
                fi
            };
            r[me].seq[s & 1] = s; /* publish */
            if
            :: fails -> goto close /* fail() does not wait */
            :: else
            fi;
            WAIT(EVERY(HAS_ROW)); /* agree */
            settled = 1;
            j = 0;
            any = 0;
            do
            :: j < N ->
                atomic {
                    assert(r[j].data[s & 1] == s); /* ROW */
#if FAULT == 6
                    any = any || (r[j].failed[s & 1] && j == 0);
#else
                    any = any || r[j].failed[s & 1] || r[j].changed[s & 1];
#endif
                    j++
                }
            :: else -> break
            od;
            atomic {
#ifndef CHANGES
                assert(verdict[s] == 0 || verdict[s] == 1 + any); /* VERDICT */
#endif
                verdict[s] = 1 + any;
                j = 0
            };
            if
            :: any -> /* refuse */
                atomic { NOTE_REFUSAL };
#if FAULT != 7
                WAIT(EVERY(KNOWS));
                if
                :: EVERY(HAS_REFUSED)
                :: else -> poison = 1; goto raise
                fi;
#endif
                r[me].freed = s;
                goto close
            :: else
            fi;
            do /* push into the peers' outputs */
            :: j == me -> j++
            :: j < N && j != me ->
                if :: poison -> goto raise :: else fi;
                atomic { /* here any time may have passed */
                    assert(r[j].data[s & 1] == s);    /* ROW: it names the output's place */
                    assert(r[j].returned < s);        /* DONE */
                    assert(!r[j].raised || r[j].cut); /* LATE: else the caller would see it */
                    assert(!r[j].reused);             /* LATE */
                    assert(r[j].freed < s);           /* REFUSED */
                    r[j].copied[me] = s;
                    j++
                }
            :: else -> break
            od;
            if :: poison -> goto raise :: else fi;
            r[me].done = s;
#if FAULT != 2
            (EVERY(HAS_DONE) || poison || DISAGREES || SOME(LEFT_BEFORE_DONE));
            if
            :: EVERY(HAS_DONE)
            :: else -> poison = 1; goto raise
            fi;
#endif
            CONFIRM;
            atomic { /* DONE: the output is complete */
                j = 0;
                do
                :: j < N -> assert(j == me || r[me].copied[j] == s); j++
                :: else -> break
                od;
                r[me].returned = s
            };
close:
            r[me].busy = 0;
            if :: poison -> r[me].acked = 1 :: else fi
        :: else -> break
        od;
        goto leave;
raise:
        skip;
        atomic {
#if FAULT != 4
            r[me].cut = 1;
#endif
            r[me].raised = 1
        };
        r[me].busy = 0;
        r[me].acked = 1;
#if FAULT != 5
        (EVERY(PROMISED));
#endif
        r[me].reused = 1; /* the caller has freed the array: its block is used again */
leave:
        r[me].acked = 1;
        r[me].left = 1
    } unless { !r[me].alive }
}

active proctype Kernel() {
    byte v;
    atomic {
        v = 0;
        do
        :: v < N -> r[v].alive = 1; run Process(v); v++
        :: else -> break
        od
    }
    if
    :: true -> goto end /* nothing happens */
    :: true             /* a timeout or an abort */
    :: r[0].alive = 0   /* a rank is killed */
    :: r[N - 1].alive = 0
    fi;
#if FAULT != 3
    poison = 1; /* of a death the peers' liveness watch tells, some time later */
#endif
end:
    (true)
}

#ifdef CHANGES
/* The last rank's row of some operator says that it has failed, and later that it has not. */
active proctype Vandal() {
    byte which = 0;
    if
    :: which = 0
    :: which = 1
    fi;
    r[N - 1].changed[which] = 1;
    r[N - 1].changed[which] = 0
}
#endif
