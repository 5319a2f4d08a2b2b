// Runs the tests of a file that has no `main` of its own.
#include "check.h"

int main(int argc, char** argv) {
    return testing::run_all(argc, argv);
}
