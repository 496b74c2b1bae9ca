"""Two hosts on one machine: network namespaces joined by a cable, with the launchers that start a run on each."""

import os
import shlex
import shutil
import signal
import subprocess
import time

import psutil
import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("tokenizers")

from helpers.launching import ENVIRONMENT, BackgroundRun, as_numbers, in_folder, make_corpus, steps, train, trainer

pytestmark = pytest.mark.slow

ADDRESSES = ("10.213.77.1", "10.213.77.2")
INTERFACE = "cable"
PORT = 29517
SSH_PORT = 29518
SCHEDULE = ("--zero-stage", 1, "--lr-decay-iters", 1000)
STEPS = 6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def one_host(corpus):
    """The four ranks of two hosts on one."""
    return train(corpus, *SCHEDULE, ranks=4, train_iters=STEPS)


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def hosts():
    """The names of two network namespaces, in the order of ``ADDRESSES``."""
    names = [f"bfp{os.getpid()}{letter}" for letter in "ab"]
    if not shutil.which("ip"):
        pytest.skip("two hosts need the command ip (iproute2)")
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("-n", names[0], "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", names[1])
            for name, address in zip(names, ADDRESSES):
                ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
                ip("-n", name, "link", "set", INTERFACE, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
        yield names
    finally:
        for name in names:
            kill_host(name)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def kill_host(name):
    """SIGKILL to all processes of a host."""
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
    processes = [psutil.Process(int(pid)) for pid in listed if psutil.pid_exists(int(pid))]
    for process in processes:
        process.kill()
    psutil.wait_procs(processes, timeout=30)


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("".join(f"{address} slots=2\n" for address in ADDRESSES))
    return path


def start(host, corpus, log, hostfile, node, *options, train_iters=STEPS):
    """``deepspeed --no_ssh`` on a host, for two ranks there."""
    command = ["ip", "netns", "exec", host, "deepspeed", "--hostfile", str(hostfile), "--no_ssh"]
    command += ["--node_rank", str(node), "--master_addr", ADDRESSES[0], "--master_port", str(PORT)]
    command += trainer(corpus, *SCHEDULE, *options, train_iters=train_iters)
    return BackgroundRun(command, log, cwd=corpus, environment=ENVIRONMENT | {"GLOO_SOCKET_IFNAME": INTERFACE})


def test_two_hosts_train_as_one(hosts, corpus, one_host, hostfile, tmp_path):
    runs = [start(host, corpus, tmp_path / f"{node}.log", hostfile, node) for node, host in enumerate(hosts)]
    assert [run.end(240) for run in runs] == [0, 0], runs[0].output()[-3000:]
    assert steps(runs[0].output()) == one_host
    assert not steps(runs[1].output())


def test_one_host_goes_on_when_the_other_is_killed(hosts, corpus, hostfile, tmp_path):
    options = (*in_folder(tmp_path / "checkpoints"), "--save-interval", 1)
    runs = [
        start(host, corpus, tmp_path / f"{node}.log", hostfile, node, *options, train_iters=100_000)
        for node, host in enumerate(hosts)
    ]
    runs[0].wait_for_steps(3)
    kill_host(hosts[1])
    assert runs[0].end(240) not in (0, 2)
    before = steps(runs[0].output())
    hostfile.write_text(f"{ADDRESSES[0]} slots=2\n")
    last = max(before) + 3
    resumed = start(hosts[0], corpus, tmp_path / "resumed.log", hostfile, 0, *options, train_iters=last)
    assert resumed.end(240) == 0, resumed.output()[-3000:]
    after = steps(resumed.output())
    whole = train(corpus, *SCHEDULE, ranks=4, train_iters=last)
    assert before == {step: whole[step] for step in before}
    assert list(after) == list(range(min(after), last + 1)) and min(after) <= max(before) + 1
    assert [values[2] for values in after.values()] == [str(8 * step) for step in after]
    for (loss, norm), (expected, expected_norm) in zip(as_numbers(after), as_numbers({s: whole[s] for s in after})):
        assert loss == pytest.approx(expected, abs=2e-5) and norm == pytest.approx(expected_norm, rel=1e-3)


@pytest.fixture
def ssh_folder(hosts, tmp_path):
    """An SSH server on each host; a folder whose ``ssh`` reaches them without a password."""
    server = shutil.which("sshd") or "/usr/sbin/sshd"
    missing = [name for name in ("ssh", "ssh-keygen", "pdsh", "unshare") if not shutil.which(name)]
    missing += [] if os.path.exists(server) else ["sshd"]
    if missing:
        pytest.skip(f"a hostfile over SSH needs {', '.join(missing)} (openssh-server, pdsh)")
    folder = tmp_path / "ssh"
    folder.mkdir(mode=0o700)
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    os.makedirs("/run/sshd", exist_ok=True)  # where the server gives up its rights
    for host, address in zip(hosts, ADDRESSES):
        config = {"Port": SSH_PORT, "ListenAddress": address, "HostKey": folder / "host_key", "UsePAM": "no"}
        config |= {"AuthorizedKeysFile": folder / "key.pub", "StrictModes": "no", "PidFile": "none"}
        config |= {"PermitRootLogin": "yes", "PasswordAuthentication": "no"}
        write_config(folder / f"{host}.conf", config)
        # process numbers of its own: deepspeed, when terminated, kills by name whatever launcher a host runs
        command = ["ip", "netns", "exec", host, "unshare", "--pid", "--fork", "--mount-proc"]
        subprocess.Popen([*command, server, "-D", "-f", str(folder / f"{host}.conf")])
    config = {"Port": SSH_PORT, "IdentityFile": folder / "key", "IdentitiesOnly": "yes", "LogLevel": "ERROR"}
    write_config(folder / "config", config | {"StrictHostKeyChecking": "no", "UserKnownHostsFile": "/dev/null"})
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder / "config"} "$@"\n')
    (folder / "ssh").chmod(0o755)
    try:
        for address in ADDRESSES:
            assert first_process(hosts[0], folder / "ssh", address) == "sshd", "the host sees processes of the machine"
        yield folder
    finally:
        for host in hosts:
            kill_host(host)


def first_process(host, ssh, address):
    """The name of the first process of the host at an address, asked for from another host once it answers."""
    for _ in range(50):
        command = ["ip", "netns", "exec", host, str(ssh), address, "cat", "/proc/1/comm"]
        answer = subprocess.run(command, capture_output=True, text=True)
        if answer.returncode == 0:
            break
        time.sleep(0.2)
    return answer.stdout.strip()


def write_config(path, config):
    path.write_text("".join(f"{name} {value}\n" for name, value in config.items()))


def launch_over_ssh(hosts, corpus, hostfile, ssh_folder, *options, train_iters=STEPS):
    """``deepspeed --hostfile`` on the first host, which starts the ranks of both."""
    exports = {"GLOO_SOCKET_IFNAME": INTERFACE, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": 1}
    (ssh_folder / ".deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in exports.items()))
    command = ["ip", "netns", "exec", hosts[0], "deepspeed", "--hostfile", str(hostfile)]
    command += ["--master_addr", ADDRESSES[0], "--master_port", str(PORT)]
    # pdsh hands the command line to a shell on each host: the launcher quotes nothing but spaces
    command += map(shlex.quote, trainer(corpus, *SCHEDULE, *options, train_iters=train_iters))
    environment = ENVIRONMENT | {"PATH": f"{ssh_folder}{os.pathsep}{ENVIRONMENT['PATH']}"}
    return BackgroundRun(command, ssh_folder / "launch.log", cwd=ssh_folder, environment=environment)


def test_a_hostfile_over_ssh_trains_the_same(hosts, corpus, one_host, hostfile, ssh_folder):
    run = launch_over_ssh(hosts, corpus, hostfile, ssh_folder)
    assert run.end(240) == 0, run.output()[-3000:]
    assert steps(run.output()) == one_host


def test_a_launcher_that_is_terminated_stops_both_hosts_after_a_checkpoint(
    hosts, corpus, hostfile, ssh_folder, tmp_path
):
    """Its output is gone with it: what the ranks did then is seen from the checkpoint."""
    folder = tmp_path / "checkpoints"
    run = launch_over_ssh(hosts, corpus, hostfile, ssh_folder, *in_folder(folder), train_iters=100_000)
    run.wait_for_steps(2)
    run.process.send_signal(signal.SIGTERM)
    run.end()
    end = time.monotonic() + 90
    while trainers(hosts):
        assert time.monotonic() < end
        time.sleep(0.1)
    last = int((folder / "latest").read_text().removeprefix("iter_"))
    resumed = train(corpus, *SCHEDULE, *in_folder(folder), ranks=4, train_iters=last + 2)
    assert list(resumed) == [last + 1, last + 2]
    whole = train(corpus, *SCHEDULE, ranks=4, train_iters=last + 2)
    assert whole == whole | steps(run.output()) | resumed


def trainers(hosts):
    """Process numbers on the hosts whose command line names the trainer."""
    numbers = []
    for host in hosts:
        for pid in subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True).stdout.split():
            try:
                numbers += [pid] if "pretrain_gpt.py" in " ".join(psutil.Process(int(pid)).cmdline()) else []
            except psutil.NoSuchProcess:
                pass
    return numbers
