/* sizes.c: prints the vectors of this machine's build as compiler options. The work space of attention depends on them,
 * so a planner for the browser is compiled with the same ones. */
#include "../../lib/cpu/vectors.h" // defines: VL, MR, PAIR

int main(void) {
    printf("-DPLANNED_VL=%d -DPLANNED_MR=%d -DPLANNED_PAIR=%d\n", VL, MR, PAIR);
    return 0;
}
