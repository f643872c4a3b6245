/* Paths: learned per root, predicted by what followed the last time, found again after a divergence. */
#include "check.h"

#include <string.h>

#include "core/path.h"

enum { KEY = 1, OTHER = 2 };

static viking_paths paths;
static bool steady;
static uint32_t learned;

static void begin(uint64_t key)
{
    CHECK_OK(viking_paths_begin(&paths, key, &steady, &learned));
}

/* Each letter is a use of a weight that ends at once; returns how many were expected. */
static uint32_t walk(const char *uses)
{
    uint32_t count = 0;
    for (; *uses != 0; uses++) {
        uint32_t index = 0;
        bool expected = false;
        CHECK_OK(viking_paths_use(&paths, (uint32_t)(*uses - 'a'), VIKING_USE_READ, &index, &expected));
        viking_paths_release(&paths, paths.pass, index);
        count += expected;
    }
    return count;
}

static uint32_t pass(uint64_t key, const char *uses)
{
    begin(key);
    return walk(uses);
}

/* What the next uses are predicted to be, up to 20. */
static const char *prediction(void)
{
    static char text[21];
    viking_cursor cursor = paths.expected;
    uint32_t length = 0;
    for (const viking_use *use; length < 20 && (use = viking_paths_next(&paths, &cursor)) != NULL;)
        text[length++] = (char)('a' + use->weight);
    text[length] = 0;
    return text;
}

static bool predicts(const char *uses)
{
    return strncmp(prediction(), uses, strlen(uses)) == 0;
}

static void open_paths(void)
{
    viking_paths_init(&paths);
}

static void close_paths(void)
{
    viking_paths_free(&paths);
}

static void the_first_pass_is_learned(void)
{
    open_paths();
    CHECK(pass(KEY, "abcba") == 0 && predicts(""));
    begin(KEY);
    CHECK(learned == 0 && !steady && predicts("abcba"));
    CHECK(walk("abcba") == 5);
    begin(KEY);
    CHECK(learned == VIKING_NO_PATH && predicts("abcbaabcba"));
    CHECK(walk("abcba") == 5);
    begin(KEY);
    CHECK(steady);
    CHECK(paths.count == 1 && paths.paths[0].hits == 3);
    close_paths();
}

static void a_pass_without_uses_is_no_path(void)
{
    open_paths();
    begin(KEY);
    begin(KEY);
    CHECK(paths.count == 0);
    CHECK(pass(KEY, "ab") == 0);
    begin(KEY);
    begin(OTHER);
    begin(KEY);
    CHECK(paths.count == 1 && predicts("ab"));
    close_paths();
}

static void roots_have_paths_of_their_own(void)
{
    open_paths();
    for (int round = 0; round < 4; round++) {
        uint32_t expected = pass(KEY, "abcba") + pass(OTHER, "abc");
        CHECK(expected == (round == 0 ? 0 : 8));
    }
    CHECK(paths.count == 2);
    begin(KEY);
    CHECK(steady && predicts("abcbaabcabcba"));
    close_paths();
}

static void the_path_taken_most_often_is_the_guess(void)
{
    open_paths();
    pass(KEY, "abc");
    pass(KEY, "abc");
    pass(KEY, "acb");
    pass(OTHER, "x");
    pass(OTHER, "x");
    begin(KEY); /* nothing of this key has followed that */
    CHECK(predicts("abc"));
    close_paths();
}

static void a_known_branch_is_taken_at_once(void)
{
    open_paths();
    pass(KEY, "abcdef");
    pass(KEY, "abxyz");
    pass(KEY, "abcdef");
    begin(KEY); /* abxyz is what followed */
    CHECK(walk("ab") == 2 && walk("c") == 0 && predicts("def") && walk("def") == 3);
    begin(KEY);
    CHECK(paths.count == 2);
    close_paths();
}

static void a_skipped_use_is_found_again_two_uses_later(void)
{
    open_paths();
    pass(KEY, "abcdefgh");
    begin(KEY);
    CHECK(walk("ab") == 2 && walk("d") == 0);
    CHECK(walk("e") == 0 && predicts("fgh") && walk("fgh") == 3);
    begin(KEY);
    CHECK(learned == 1 && paths.count == 2);
    close_paths();
}

static void an_inserted_use_costs_that_use(void)
{
    open_paths();
    pass(KEY, "abcdefgh");
    begin(KEY);
    CHECK(walk("abc") == 3 && walk("x") == 0 && walk("d") == 0 && walk("efgh") == 4);
    close_paths();
}

static void a_path_that_goes_on_is_a_new_one(void)
{
    open_paths();
    pass(KEY, "abc");
    begin(KEY);
    CHECK(walk("abc") == 3 && walk("d") == 0);
    begin(KEY);
    CHECK(learned == 1 && predicts("abcd"));
    close_paths();
}

static void a_path_that_ends_early_is_a_new_one(void)
{
    open_paths();
    pass(KEY, "abcd");
    CHECK(pass(KEY, "ab") == 2);
    begin(KEY);
    CHECK(learned == 1 && !steady);
    close_paths();
}

static void the_least_recent_path_makes_room(void)
{
    open_paths();
    for (uint32_t i = 0; i < 3 * VIKING_PATH_LIMIT; i++) {
        const char uses[] = {(char)('a' + i % 26), (char)('a' + i / 26), 0};
        if (i % 5 == 0)
            pass(OTHER, "zz"); /* taken again and again: stays */
        pass(KEY, uses);
        CHECK(paths.count <= VIKING_PATH_LIMIT);
        for (uint32_t k = 0; k < paths.count; k++)
            CHECK(paths.paths[k].next == VIKING_NO_PATH || paths.paths[k].next < paths.count);
        prediction();
    }
    CHECK(pass(OTHER, "zz") == 2);
    close_paths();
}

/* Threads interleave differently each time: the same order of uses is the same path. */
static void ticks_do_not_tell_paths_apart(void)
{
    open_paths();
    pass(KEY, "ab");
    begin(KEY);
    uint32_t first, second;
    bool expected;
    CHECK_OK(viking_paths_use(&paths, 0, VIKING_USE_READ, &first, &expected));
    CHECK_OK(viking_paths_use(&paths, 1, VIKING_USE_READ, &second, &expected));
    CHECK(expected && first == 0 && second == 1);
    viking_paths_release(&paths, paths.pass, first);
    viking_paths_release(&paths, paths.pass, second);
    begin(KEY);
    CHECK(paths.count == 1);
    close_paths();
}

static void learned_paths_have_no_open_uses(void)
{
    open_paths();
    uint32_t index, late;
    bool expected;
    begin(KEY);
    CHECK_OK(viking_paths_use(&paths, 0, VIKING_USE_READ, &index, &expected));
    uint64_t number = paths.pass;
    walk("bc");
    begin(KEY);
    const viking_trace *trace = &paths.paths[0].trace;
    CHECK(trace->uses[0].end == trace->ticks - 1 && trace->uses[2].end < trace->uses[0].end);
    CHECK_OK(viking_paths_use(&paths, 0, VIKING_USE_READ, &late, &expected));
    viking_paths_release(&paths, number, index); /* of the pass before: names nothing here */
    CHECK(paths.seen.uses[late].end == UINT32_MAX);
    close_paths();
}

static void kinds_tell_uses_apart(void)
{
    open_paths();
    pass(KEY, "a");
    begin(KEY);
    uint32_t index;
    bool expected;
    CHECK_OK(viking_paths_use(&paths, 0, VIKING_USE_WRITE, &index, &expected));
    CHECK(!expected);
    close_paths();
}

static void a_pass_may_begin_again_without_its_root(void)
{
    open_paths();
    pass(KEY, "abcba");
    pass(KEY, "abcba");
    begin(KEY);
    uint64_t number = paths.pass;
    CHECK(walk("abcbaabcbaab") == 12 && paths.pass == number + 2);
    close_paths();
}

static void without_any_root_the_period_is_found(void)
{
    open_paths();
    uint32_t uses = 0;
    while (paths.count == 0) {
        walk("abcdcb");
        uses += 6;
        CHECK(uses < 5000);
    }
    CHECK(paths.paths[0].trace.count == 6);
    const viking_trace *trace = &paths.paths[0].trace;
    for (uint32_t i = 0; i < trace->count; i++)
        CHECK(trace->uses[i].end != UINT32_MAX);
    for (int round = 0; round < 10; round++)
        CHECK(walk("abcdcb") == 6);
    close_paths();
}

static void clearing_forgets_all_but_the_pass(void)
{
    open_paths();
    pass(KEY, "abc");
    pass(KEY, "ab");
    uint64_t number = paths.pass;
    viking_paths_clear(&paths);
    CHECK(paths.count == 0 && paths.pass >= number && paths.key == KEY && predicts(""));
    walk("c");
    begin(KEY);
    CHECK(learned == 0 && predicts("c"));
    close_paths();
}

int main(void)
{
    RUN(the_first_pass_is_learned);
    RUN(a_pass_without_uses_is_no_path);
    RUN(roots_have_paths_of_their_own);
    RUN(the_path_taken_most_often_is_the_guess);
    RUN(a_known_branch_is_taken_at_once);
    RUN(a_skipped_use_is_found_again_two_uses_later);
    RUN(an_inserted_use_costs_that_use);
    RUN(a_path_that_goes_on_is_a_new_one);
    RUN(a_path_that_ends_early_is_a_new_one);
    RUN(the_least_recent_path_makes_room);
    RUN(ticks_do_not_tell_paths_apart);
    RUN(learned_paths_have_no_open_uses);
    RUN(kinds_tell_uses_apart);
    RUN(a_pass_may_begin_again_without_its_root);
    RUN(without_any_root_the_period_is_found);
    RUN(clearing_forgets_all_but_the_pass);
    return 0;
}
