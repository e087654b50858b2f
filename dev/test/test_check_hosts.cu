/* test_check_hosts.cu: includes check_hosts and checks what it makes of measurements (test_hosts.h). That it finds slow
 * hosts and broken networks is tested on several hosts: hosts.sh.
 *
 *   test_check_hosts [GROUP…]    all groups, or the named ones; list: their names; short: what `make test` runs
 */
#include "conditions.h"
#include "../../train_llama3.cu"
#include "../../programs/check_hosts.cu"
#include "harness.h"
#include "jobs.h"
#include "test_hosts.h"

int main(int argc, char **argv) {
    static const TestGroup groups[] = {{"hosts", test_check_hosts, C_BUILD}};
    device_prepare_process(1);
    return run_tests(groups, 1, argc, argv);
}
