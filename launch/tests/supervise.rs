//! Jobs of small shell programs: what ranks are told, how the job ends when one of them does, and that nothing is left behind.

mod common;

use common::*;
use std::path::Path;
use std::time::Instant;

/// Each rank writes its process number, then runs `script`.
fn job(ranks: usize, folder: &Path, options: &[&str], script: &str) -> Running {
    let script = format!("echo $$ > {0}/pid.$RANK.new; mv {0}/pid.$RANK.new {0}/pid.$RANK\n{script}", folder.display());
    let ranks = ranks.to_string();
    Running::start(zlaunch().args(["-n", &ranks]).args(options).args(["--", "sh", "-c", &script]))
}

/// A rank that has not set its trap yet would end by the signal.
fn trapped(folder: &Path, ranks: usize) {
    until("all ranks have set their traps", || (0..ranks).all(|r| folder.join(format!("trap.{r}")).exists()));
}

#[test]
fn ranks_get_torchruns_variables_and_logs() {
    let dir = tempfile::tempdir().unwrap();
    let logs = dir.path().join("logs");
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR port=$MASTER_PORT\n\
                  stat -c '%a %n' $ZLAUNCH_JOB; echo oops >&2";
    let done = job(3, dir.path(), &["--logs", logs.to_str().unwrap()], script).finish();
    assert_eq!(done.code, Some(0), "{}", done.err);
    for rank in 0..3 {
        let line = format!("[rank {rank}] {rank}/3 {rank}/3 127.0.0.1 port=");
        assert!(done.out.contains(&line), "{line} not in {}", done.out);
        assert!(done.err.contains(&format!("[rank {rank}] oops")));
        let log = std::fs::read_to_string(logs.join(format!("rank-{rank}.log"))).unwrap();
        assert!(log.contains("oops") && log.contains(&format!("{rank}/3")), "{log}");
    }
    let secret = done.out.lines().find_map(|l| l.split("600 ").nth(1)).expect("the secret's mode is 600");
    assert!(!Path::new(secret).exists(), "the secret is removed at the end");
}

#[test]
fn arguments_pass_unchanged() {
    let done = run(&["--", "printf", "%s|", "--set", "a b", "-n"]);
    assert_eq!((done.code, done.out.trim()), (Some(0), "[rank 0] --set|a b|-n|"));
}

#[test]
fn the_first_failure_decides_and_ends_all() {
    let dir = tempfile::tempdir().unwrap();
    let start = Instant::now();
    let done = job(3, dir.path(), &[], "[ $RANK = 1 ] && { echo my last words; exit 7; }; sleep 1000").finish();
    done.says(7, &["rank 1 (pid", "failed: exit code 7", "its last words:\n    my last words"]);
    let pids = pids(dir.path(), 3);
    assert!(done.err.contains(&format!("rank 1 (pid {}, host ", pids[1])));
    nobody_left(&pids);
    assert!(start.elapsed() < HANG);
}

#[test]
fn a_killed_rank_is_named_with_its_signal() {
    let dir = tempfile::tempdir().unwrap();
    let running = job(3, dir.path(), &[], "exec sleep 1000");
    let pids = pids(dir.path(), 3);
    kill(pids[2], 9);
    let done = running.finish();
    done.says(137, &[&format!("rank 2 (pid {}, host ", pids[2]), "died: signal 9 (SIGKILL)"]);
    nobody_left(&pids);
}

#[test]
fn ranks_that_ignore_sigterm_are_killed() {
    let dir = tempfile::tempdir().unwrap();
    let done = job(2, dir.path(), &[], "trap '' TERM; [ $RANK = 0 ] && exit 3; while :; do sleep 1; done").finish();
    done.says(3, &["rank 0 (pid"]);
    nobody_left(&pids(dir.path(), 2));
}

#[test]
fn a_stopped_rank_is_found_and_named() {
    let dir = tempfile::tempdir().unwrap();
    let running = job(3, dir.path(), &["--heartbeat-timeout", "1"], "exec sleep 1000");
    let pids = pids(dir.path(), 3);
    kill(pids[1], 19);
    let done = running.finish();
    done.says(1, &[&format!("rank 1 (pid {}, host ", pids[1]), "is stopped (SIGSTOP): no sign of life for 1 s"]);
    nobody_left(&pids);
}

#[test]
fn a_rank_may_end_well_before_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let script = format!("[ $RANK = 0 ] || while ! [ -e {}/go ]; do sleep 0.05; done; echo end $RANK", dir.path().display());
    let running = job(2, dir.path(), &[], &script);
    let pids = pids(dir.path(), 2);
    until("rank 0 has ended", || !group_alive(pids[0]));
    std::fs::write(dir.path().join("go"), "").unwrap();
    let done = running.finish();
    assert_eq!(done.code, Some(0), "{}", done.err);
    assert!(done.out.contains("[rank 1] end 1"), "{}", done.out);
}

#[test]
fn what_ranks_started_ends_with_them() {
    let dir = tempfile::tempdir().unwrap();
    let done = job(2, dir.path(), &[], "sleep 1000 &").finish();
    assert_eq!(done.code, Some(0), "{}", done.err);
    nobody_left(&pids(dir.path(), 2));
}

#[test]
fn one_interrupt_asks_ranks_to_end() {
    let dir = tempfile::tempdir().unwrap();
    let script = format!("trap 'echo saved; exit 0' TERM; echo > {}/trap.$RANK; while :; do sleep 0.05; done", dir.path().display());
    let running = job(2, dir.path(), &[], &script);
    let pids = pids(dir.path(), 2);
    trapped(dir.path(), 2);
    running.signal(2);
    let done = running.finish();
    done.says(0, &["again to end at once"]);
    assert!(done.out.contains("[rank 0] saved") && done.out.contains("[rank 1] saved"), "{}", done.out);
    nobody_left(&pids);
}

#[test]
fn ranks_that_end_by_our_signal_are_no_failure_but_no_success() {
    let dir = tempfile::tempdir().unwrap();
    let running = job(2, dir.path(), &[], "exec sleep 1000");
    let pids = pids(dir.path(), 2);
    running.signal(15);
    running.finish().says(143, &["ended on signal 15 (SIGTERM)"]);
    nobody_left(&pids);
}

#[test]
fn a_second_interrupt_ends_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let script = "trap 'echo > DIR/term.$RANK' TERM; echo > DIR/trap.$RANK; while :; do sleep 0.05; done";
    let running = job(2, dir.path(), &[], &script.replace("DIR", &dir.path().display().to_string()));
    let pids = pids(dir.path(), 2);
    trapped(dir.path(), 2);
    running.signal(2);
    until("both ranks were asked", || (0..2).all(|r| dir.path().join(format!("term.{r}")).exists()));
    running.signal(2);
    running.finish().says(130, &["again to end at once", "ended at once, on signal 2 (SIGINT)"]);
    nobody_left(&pids);
}

#[test]
fn ranks_die_with_a_killed_launcher() {
    let dir = tempfile::tempdir().unwrap();
    let running = job(2, dir.path(), &[], "exec sleep 1000");
    let pids = pids(dir.path(), 2);
    running.signal(9);
    running.finish();
    nobody_left(&pids);
}

#[test]
fn a_long_line_without_end_is_passed_on() {
    let done = run(&["--", "sh", "-c", "head -c 300000 /dev/zero | tr '\\0' x; printf 'no newline'"]);
    assert_eq!(done.code, Some(0), "{}", done.err);
    assert!(done.out.contains("no newline"));
}
