// What a test chooses, and the door by which it does.
#include "device.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

HIDDEN struct settings settings = {
    .devices = 1, .capability = 90, .memory = 80L << 30, .pinnable = 1L << 40, .late = 0, .late_us = 400};

static const struct {
    const char *name;
    size_t offset;
} NAMES[] = {
#define NAME(field) {#field, offsetof(struct settings, field)}
    NAME(devices),     NAME(capability),    NAME(memory),    NAME(pinnable), NAME(late), NAME(late_us), NAME(fail_launch),
    NAME(fail_malloc), NAME(fail_register), NAME(drop_wait), NAME(register_us), NAME(capturing),
};

static int *attribute_of_name(const char *name) { // NULL: it names none
    int attribute;
    bool is_one = sscanf(name, "attribute.%d", &attribute) == 1 && attribute >= 0 && attribute < NUM_ATTRIBUTES;
    return is_one ? &settings.attributes[attribute] : NULL;
}

static bool set(const char *name, long value) {
    int *attribute = attribute_of_name(name);
    if (attribute) {
        *attribute = (int)value;
        return true;
    }
    for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++)
        if (!strcmp(name, NAMES[i].name)) {
            *(long *)((char *)&settings + NAMES[i].offset) = value;
            return true;
        }
    return false;
}

// Apply "name=value,..."; the number of choices that are not known.
EXPORT int cuda_in_ram_configure(const char *text) {
    char *copy = strdup(text), *rest = copy, *choice;
    int num_unknown = 0;
    while ((choice = strsep(&rest, ",")))
        if (*choice) {
            char *value = strchr(choice, '=');
            if (value)
                *value++ = 0;
            num_unknown += !value || !set(choice, strtol(value, NULL, 0));
        }
    free(copy);
    return num_unknown;
}

// What a choice is now (a countdown: what is left of it); -1 for a name that is not known.
EXPORT long cuda_in_ram_setting(const char *name) {
    int *attribute = attribute_of_name(name);
    if (attribute)
        return *attribute;
    for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++)
        if (!strcmp(name, NAMES[i].name))
            return *(long *)((char *)&settings + NAMES[i].offset);
    return -1;
}

HIDDEN bool falls_due(long *countdown) {
    if (__atomic_load_n(countdown, __ATOMIC_SEQ_CST) <= 0)
        return false;
    return __atomic_sub_fetch(countdown, 1, __ATOMIC_SEQ_CST) == 0;
}

__attribute__((constructor)) static void read_environment(void) {
    memset(settings.attributes, -1, sizeof settings.attributes);
    const char *text = getenv("CUDA_IN_RAM");
    if (text && cuda_in_ram_configure(text)) {
        fprintf(stderr, "CUDA_IN_RAM: '%s' names a choice that this device does not have\n", text);
        abort();
    }
}
