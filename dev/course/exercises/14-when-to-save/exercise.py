"""The Young-Daly interval and what it costs, from plan_llama3's simulation of failing hosts."""
from answers import Mistake, Number, Solved
from program import CLUSTER, command_line, plan

HOSTS, MTBF, STEP, SAVE = 128, 5696, 4, 40
OPTIONS = (f"--model llama3-8b --world {HOSTS * 8} --cluster {CLUSTER} --mtbf {MTBF} --steps 100000 --spares 4 "
           f"--detect 60 --step-seconds {STEP} --save-seconds {SAVE} --pause-seconds 2")
NUMBERS = [Number("steps between saves", "steps", 0.03),
           Number("time lost for saving and for repeating steps", "%", 0.1)]


def solve():
    goodput = plan(OPTIONS)["goodput"]
    row = next(r for r in goodput["rows"] if r["save_mode"] == "sync" and r["interval"] == "Young-Daly")
    steps, lost = row["save_every"], row["lost"]
    percent = 100 * (lost["saving"] + lost["repeating"])
    of_steps = [
        Mistake(steps * HOSTS**0.5, "A failure of any host stops the run, so the MTBF of the run is much shorter than "
                "that of a host."),
        Mistake(steps / 2**0.5, "Half of an interval is repeated on average, not all of it: derive the minimum again."),
        Mistake(steps * STEP, "That is in seconds. How many steps is it?"),
        Mistake(goodput["run_mtbf_s"] / STEP, "That is one save per failure. A save costs less than the half interval "
                "that a failure loses."),
        Mistake(steps / 60, "The MTBF is in hours: 3,600 seconds each."),
        Mistake(SAVE * 100 / STEP, "Why a fixed share of the time? The best interval depends on how often hosts fail."),
    ]
    of_percent = [
        Mistake(percent / 2, "That is one of the two. At the best interval, saving and repeating cost the same."),
        Mistake(percent * 2, "After a failure, half of an interval is repeated on average."),
        Mistake(100 * (1 - row["goodput"]), "That also counts detection and relaunching."),
    ]
    mtbf = goodput["run_mtbf_s"]
    interval = goodput["young_daly_sync_s"]
    derivation = f"""\
The run's MTBF is {MTBF} h / {HOSTS} hosts = {mtbf:,.0f} s. Per second of training with a save every x seconds, saving
costs {SAVE}/x, and a failure, of which there are 1/{mtbf:,.0f}, costs x/2: minimal at x = sqrt(2 · {SAVE} · \
{mtbf:,.0f}) = {interval:,.0f} s
= {interval / STEP:,.0f} steps; each of the two then costs {100 * SAVE / interval:.2f} % of the training time.
Simulated with --save-every {steps}: {100 * lost['saving']:.2f} % for saving, {100 * lost['repeating']:.2f} % for
repeating steps."""
    return Solved([steps, percent], [of_steps, of_percent], derivation, [command_line(OPTIONS)])
