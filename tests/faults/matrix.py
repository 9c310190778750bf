"""The matrix of faults: each with the tests that show what holds, and the guards that make it hold.

A guard is the name of a one-line fault of `scripts/mutations`, which takes it out, and the test
which must then fail. `scripts/mutations --matrix` tries all of them. `test_matrix.py` checks that
the tests and guards which are named here exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Row(NamedTuple):
    """`holds`: what the tests show; `guards`: by name, the test that fails without it."""

    fault: str
    holds: str
    tests: tuple[str, ...]
    guards: dict[str, str]


TABLE = """
# SCRIPT FLUSH every 50 ms under load
= no error, one more round trip, no double charge
stores/test_transport.py::test_a_lost_script_costs_one_round_trip_more
- script-not-sent
stores/test_transport.py::test_scripts_that_are_lost_all_the_time_under_load

# a reply dropped after execution, 1 to 10 times; of twenty replies one
= one charge per call; the outcome is unknown, and counted
faults/test_modes.py::test_of_twenty_replies_one_is_dropped
- call-sent-again
stores/test_transport_outcomes.py::test_a_reply_lost_after_execution_is_charged_once_and_unknown
away/test_local_share.py::test_no_window_exceeds_the_limit_and_the_shares

# a server that stalls; blackhole; half-open; accept and never speak
= calls end by their deadline, nothing is charged late, later calls are answered at once
stores/test_transport_outcomes.py::test_every_call_ends_by_its_deadline_and_later_calls_succeed
stores/test_transport_outcomes.py::test_a_server_that_stalls_charges_nothing_late
- stamp-without-deadline
away/test_outages.py::test_calls_of_an_outage_are_answered_without_asking
- outage-not-found
lifecycle/test_process_exit.py::test_an_exit_does_not_wait_for_a_store_that_is_away
- exit-waits-for-what-is-away
away/test_outages.py::test_where_the_policy_is_raise_calls_fail_at_once_and_say_so
- outage-not-probed

# connections refused; 1000 calls at once
= an answer at once from the second call on; exhaustion is no outage
stores/test_transport_outcomes.py::test_refused_connections_fail_fast_until_the_server_is_back
stores/test_transport_shared_calls.py::test_a_thousand_callers_at_once_do_not_time_out
stores/test_transport_errors.py::test_a_server_with_too_many_clients_is_used_again_later
away/test_reachability.py::test_a_server_that_answers_others_is_not_away
- exhaustion-is-an-outage

# kill -9 of the primary under Sentinel; its last writes are lost
= no exception but the policy's; at most L more; answered by the new one
faults/test_modes.py::test_a_primary_is_replaced_for_all_modes_and_for_callers_that_are_refused
- outage-not-probed [killed]
stores/test_transport_topology.py::test_a_primary_under_sentinel_is_replaced_by_itself

# a zombie primary; demotion in place while a key is refused
= at most 2 L, and L with min-replicas-to-write; callers leave it
faults/test_modes.py::test_a_primary_is_replaced_for_all_modes_and_for_callers_that_are_refused
stores/test_transport_topology.py::test_a_primary_demoted_in_place_is_left
stores/test_transport_topology.py::test_a_primary_that_was_replaced_admits_nothing_where_replicas_are_required
- few-replicas-are-a-mistake
stores/test_transport_errors.py::test_a_server_with_too_few_replicas_refuses_for_now

# servers get other addresses; another primary is named while the old one answers
= found again without a restart, by the URL and by what sentinels say
stores/test_new_addresses.py
stores/test_new_addresses.py::test_a_server_that_refuses_is_left_for_that_of_its_name
- demotion-not-noticed
stores/test_new_addresses.py::test_a_cluster_is_found_again_by_the_hosts_of_its_url
- hosts-of-the-url-not-asked
stores/test_new_addresses.py::test_a_planned_failover_is_followed_although_the_old_primary_answers
- sentinels-not-asked

# OOM with noeviction; eviction
= no partial write, an outage that ends; eviction is found by doctor
stores/test_transport_errors.py::test_out_of_memory_never_leaves_a_partial_write
stores/test_transport_errors.py::test_a_server_that_evicts_takes_whole_rings
away/test_outages.py::test_a_full_server_is_an_outage_that_ends_with_an_answer
- full-is-a-mistake
cli/test_doctor.py

# a cluster is resharded under load; a primary is dead
= acknowledged = counted; other shards are not affected
faults/test_modes.py::test_a_cluster_that_changes_for_all_modes_and_for_callers_that_are_refused
stores/test_transport_topology.py::test_slots_that_move_under_load_lose_and_repeat_nothing
- ask-as-moved
stores/test_transport_topology.py::test_a_window_that_ends_while_its_slot_migrates_begins_anew
stores/test_migrating_slots.py
stores/test_transport_topology.py::test_a_dead_primary_does_not_affect_the_other_shards
stores/test_transport_topology.py::test_a_primary_with_a_replica_is_replaced_by_itself
- map-not-read-again

# steps of the server's clock
= forward: at most L more; back: no longer stall than the window
faults/test_modes.py::test_the_time_of_day_of_the_server_is_stepped
- ring-of-the-future-kept [direct]
local/test_eventual_faults.py::test_a_wrong_clock_of_the_process_does_not_matter

# storms of cancellations, and of exceptions out of signal handlers
= no reply of another call, nothing hangs, connections stay few
stores/test_transport_tasks.py::test_many_cancellations_at_random_times
stores/test_transport_shared_calls.py::test_many_exceptions_of_signal_handlers_at_random_times
stores/test_transport.py::test_swapped_replies_are_never_given_to_the_wrong_caller
- echo-not-checked

# fork anywhere; a loop that ends; SIGTERM; SIGKILL
= no lease is spent twice; what had returned is counted, but for SIGKILL
lifecycle/test_close_and_fork.py::test_parent_and_child_spend_no_lease_twice
- lease-inherited
stores/test_event_loops.py::test_a_loop_that_is_closed_under_the_limiter
lifecycle/test_sigterm.py::test_exit_on_sigterm_loses_nothing_amid_calls
local/test_leased_processes.py::test_a_killed_process_loses_no_more_than_its_lease

# a limit, its buckets or its interval changed in flight
= at most the larger limit; no garbage
ring/test_limits_in_flight.py::test_never_above_the_larger
- refusal-of-another-limit
ring/test_limits_in_flight.py::test_raised_it_admits_the_difference_at_once

# hostile input, in Python and straight into EVALSHA
= an error in Python, a refusal in the script; the ring is unchanged
limiter/test_bad_calls.py
lua/test_hostile_calls.py::test_a_hostile_argument_is_never_admitted
- cost-not-checked
lua/test_hostile_counts.py

# 1,000,000 distinct keys
= the memory of processes and server is bounded; other keys are intact
faults/test_modes.py::test_twice_as_many_keys_as_are_kept
local/test_key_states.py::test_what_is_kept_is_what_was_used_last
- key-states-unbounded
local/test_evicted_keys.py::test_a_flood_of_one_time_keys_leaves_nothing_behind
lua/test_expiry.py::test_a_ring_outlives_its_newest_bucket_by_its_window

# few rights; none; a wrong password; TLS
= the documented rights are enough; mistakes are loud under every policy
stores/test_users_and_rights.py::test_the_least_rights_are_enough
stores/test_users_and_rights.py::test_a_wrong_password_is_a_configuration_error_that_keeps_it_secret
away/test_outages.py::test_a_password_that_was_changed_meanwhile_is_loud
away/test_policies.py::test_a_configuration_error_is_raised_under_every_policy
stores/test_users_and_rights.py::test_missing_rights_are_a_configuration_error_that_names_the_remedy
- mistake-is-an-outage

# another server on the port; TLS that one side speaks; a connection that is closed blank
= the first two are named under every policy, and the last is an outage
stores/test_wrong_server.py::test_another_server_is_named_by_each_call_and_by_health
stores/test_wrong_server.py::test_tls_and_plain_are_told_apart_under_every_policy
stores/test_wrong_server.py::test_a_server_that_says_nothing_is_away
- silence-is-a-mistake
stores/test_wrong_server.py::test_calls_are_admitted_as_soon_as_redis_is_there
"""
"""After `#` a fault, and after `=` what holds; then its tests in `tests`, and after `-` the guards
that the test above them shows, some with the case of the test that fails.
"""


def _rows() -> Iterator[Row]:
    for part in TABLE.strip().split("\n\n"):
        fault, holds, *lines = part.splitlines()
        tests: list[str] = []
        guards: dict[str, str] = {}
        for line in lines:
            if line.startswith("- "):
                name, _, case = line[2:].partition(" ")
                guards[name] = tests[-1] + case
            else:
                tests.append(f"tests/{line}")
        yield Row(fault[2:], holds[2:], tuple(tests), guards)


ROWS = tuple(_rows())
